//! Who this process is and whom it trusts: a folder with three PEM files, named as Kubernetes names them
//! in secrets of the type `kubernetes.io/tls`, and read again when they change.
//!
//! All processes of a job trust one authority and nobody else. What a process is (its [`Role`]) is in its
//! certificate as a DNS name. So a server knows what its callers are, and a client that it talks to what
//! it means to talk to, wherever that runs.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tracing::{info, warn};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::role::{ANY_ROLE, Role};

/// The authority's certificate, our own with those between, and our key.
pub const CA_FILE: &str = "ca.crt";
pub const CERTIFICATE_FILE: &str = "tls.crt";
pub const KEY_FILE: &str = "tls.key";

/// What HTTP/2 is called while connections are agreed on.
const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// Why there are no credentials.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: {reason}")]
    Bad { path: PathBuf, reason: String },
    #[error("{path} is a certificate of {found}; this is a {wanted}")]
    OtherRole { path: PathBuf, found: String, wanted: Role },
}

/// How this process meets others.
#[derive(Clone, Debug)]
pub enum Exposure {
    /// In the clear, and only from this machine.
    Loopback,
    /// In the clear, from anywhere.
    Plaintext,
    /// By certificates.
    Tls(Arc<Credentials>),
}

static EXPOSURE: OnceLock<Exposure> = OnceLock::new();

/// Decides how this process meets others, once, before it opens a port or a connection.
///
/// # Panics
/// If that was decided already.
pub fn decide(exposure: Exposure) {
    EXPOSURE.set(exposure).expect("a process decides once how it meets others");
}

/// How this process meets others: from this machine alone, until something else is decided.
pub fn exposure() -> Exposure {
    EXPOSURE.get().cloned().unwrap_or(Exposure::Loopback)
}

/// The credentials of this process, if it has any.
pub fn credentials() -> Option<Arc<Credentials>> {
    match EXPOSURE.get() {
        Some(Exposure::Tls(credentials)) => Some(credentials.clone()),
        Some(Exposure::Loopback | Exposure::Plaintext) | None => None,
    }
}

/// The credentials in a folder, kept current.
#[derive(Debug)]
pub struct Credentials {
    folder: PathBuf,
    /// What the process has to be, if that is known.
    role: Option<Role>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Of the files as they were last seen, whether they were any good or not.
    seen: Stamps,
    good: Arc<Loaded>,
}

/// What tells one state of a file from another: replaced, written, or grown.
type Stamps = [Option<(u64, i64, i64, u64)>; 3];

/// Credentials as they were read.
#[derive(Debug)]
pub struct Loaded {
    /// What our own certificate says that we are.
    pub roles: Vec<Role>,
    /// When our own certificate ends, in seconds since 1970.
    pub not_after: i64,
    /// For gRPC: whoever has no certificate of the authority is not let in.
    pub server: Arc<ServerConfig>,
    /// For the admin port: others are let in as nobody.
    pub admin: Arc<ServerConfig>,
    pub client: Arc<ClientConfig>,
}

impl Credentials {
    /// Reads the folder.
    ///
    /// # Errors
    /// A sentence that names the file and what is wrong with it.
    pub fn open(folder: &Path) -> Result<Self, TlsError> {
        // Before they are read: what changes meanwhile is read again.
        let seen = stamps(folder);
        let good = Arc::new(Loaded::read(folder)?);
        let state = Mutex::new(State { seen, good });
        Ok(Self { folder: folder.to_owned(), role: None, state })
    }

    /// The same for a process that is to have `role`.
    ///
    /// # Errors
    /// As [`Credentials::open`], or that the certificate is of another role.
    pub fn open_as(folder: &Path, role: Role) -> Result<Self, TlsError> {
        let credentials = Self::open(folder)?;
        credentials.current().demand(folder, role)?;
        Ok(Self { role: Some(role), ..credentials })
    }

    /// What the files say now; if they are no good (just being written, say), what they said last.
    pub fn current(&self) -> Arc<Loaded> {
        let mut state = self.state.lock().expect("no holder panics");
        let seen = stamps(&self.folder);
        if seen != state.seen {
            state.seen = seen;
            match self.read() {
                Ok(loaded) => {
                    info!(folder = %self.folder.display(), "has new certificates");
                    state.good = Arc::new(loaded);
                }
                Err(error) => warn!(%error, "keeps its certificates: the new ones are no good"),
            }
        }
        state.good.clone()
    }
}

/// Whether callers without a certificate are let in, as nobody.
#[derive(Clone, Copy)]
enum Guests {
    Refused,
    Welcome,
}

/// The contents of a folder.
struct Files {
    folder: PathBuf,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl Credentials {
    fn read(&self) -> Result<Loaded, TlsError> {
        let loaded = Loaded::read(&self.folder)?;
        if let Some(role) = self.role {
            loaded.demand(&self.folder, role)?;
        }
        Ok(loaded)
    }
}

impl Loaded {
    /// A process stays what it is, whatever certificate it is given.
    fn demand(&self, folder: &Path, wanted: Role) -> Result<(), TlsError> {
        if self.roles.contains(&wanted) {
            return Ok(());
        }
        let found = match self.roles.as_slice() {
            [] => "no role".to_owned(),
            roles => roles.iter().map(Role::to_string).collect::<Vec<_>>().join(", "),
        };
        Err(TlsError::OtherRole { path: folder.join(CERTIFICATE_FILE), found, wanted })
    }

    fn read(folder: &Path) -> Result<Self, TlsError> {
        let files = Files::read(folder)?;
        let own = described(&files.chain[0])
            .map_err(|reason| bad(folder.join(CERTIFICATE_FILE), reason))?;
        files.check()?;
        Ok(Self {
            roles: own.roles,
            not_after: own.not_after,
            server: files.server(Guests::Refused, HTTP2)?,
            admin: files.server(Guests::Welcome, HTTP1)?,
            client: files.client()?,
        })
    }
}

impl Files {
    fn read(folder: &Path) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        let path = folder.join(CA_FILE);
        for authority in certificates(&path)? {
            roots.add(authority).map_err(|error| bad(&path, error))?;
        }
        let path = folder.join(KEY_FILE);
        let key =
            PrivateKeyDer::from_pem_slice(&read(&path)?).map_err(|error| bad(&path, error))?;
        Ok(Self {
            folder: folder.to_owned(),
            roots: Arc::new(roots),
            chain: certificates(&folder.join(CERTIFICATE_FILE))?,
            key,
            provider: Arc::new(crypto()),
        })
    }

    /// Whether others will believe us now.
    fn check(&self) -> Result<(), TlsError> {
        let roots = self.roots.clone();
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, self.provider.clone());
        let verifier = verifier.build().map_err(|error| bad(self.folder.join(CA_FILE), error))?;
        let name = ServerName::try_from(ANY_ROLE).expect("it is a DNS name");
        let (own, between) = (&self.chain[0], &self.chain[1..]);
        let verified = verifier.verify_server_cert(own, between, &name, &[], UnixTime::now());
        verified.map(|_| ()).map_err(|error| {
            bad(self.folder.join(CERTIFICATE_FILE), format!("by {CA_FILE}: {error}"))
        })
    }

    fn server(&self, guests: Guests, protocol: &[u8]) -> Result<Arc<ServerConfig>, TlsError> {
        let roots = self.roots.clone();
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, self.provider.clone());
        let verifier = match guests {
            Guests::Refused => verifier,
            Guests::Welcome => verifier.allow_unauthenticated(),
        };
        let verifier = verifier.build().map_err(|error| bad(self.folder.join(CA_FILE), error))?;
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| self.misfit(&error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| self.misfit(&error))?;
        config.alpn_protocols = vec![protocol.to_owned()];
        // Whoever resumes a session shows no certificate again, so one that is over would open doors.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    fn client(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| self.misfit(&error))?
            .with_root_certificates(self.roots.clone())
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| self.misfit(&error))?;
        Ok(Arc::new(config))
    }

    fn misfit(&self, error: &rustls::Error) -> TlsError {
        bad(self.folder.join(KEY_FILE), format!("with {CERTIFICATE_FILE}: {error}"))
    }
}

/// The cryptography that all of us use.
pub fn crypto() -> CryptoProvider {
    rustls::crypto::ring::default_provider()
}

/// What a certificate says.
#[derive(Clone, Debug)]
pub struct Described {
    pub roles: Vec<Role>,
    /// The DNS names and IP addresses that it is for.
    pub names: Vec<String>,
    /// When it ends, in seconds since 1970.
    pub not_after: i64,
}

/// What a certificate (DER) says; whoever signed it.
///
/// # Errors
/// That it is none.
pub fn described(certificate: &[u8]) -> Result<Described, String> {
    let (_, certificate) = X509Certificate::from_der(certificate).map_err(|it| it.to_string())?;
    let names = certificate.subject_alternative_name().map_err(|it| it.to_string())?;
    let names = names.map_or(&[][..], |names| names.value.general_names.as_slice());
    let names: Vec<String> = names.iter().filter_map(plain).collect();
    let is_named = |role: &Role| names.iter().any(|name| name == role.dns_name());
    Ok(Described {
        roles: Role::ALL.into_iter().filter(is_named).collect(),
        names,
        not_after: certificate.validity().not_after.timestamp(),
    })
}

/// A name as people write it, if it is of a kind that we use.
fn plain(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match <[u8; 4]>::try_from(*bytes) {
            Ok(v4) => Some(IpAddr::from(v4).to_string()),
            Err(_) => <[u8; 16]>::try_from(*bytes).ok().map(|v6| IpAddr::from(v6).to_string()),
        },
        _ => None,
    }
}

/// What the first certificate in a PEM file says; whoever signed it.
///
/// # Errors
/// A sentence that names the file and what is wrong with it.
pub fn described_file(path: &Path) -> Result<Described, TlsError> {
    described(&certificates(path)?[0]).map_err(|reason| bad(path, reason))
}

/// The certificates in a PEM file; at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match read {
        Ok(certificates) if certificates.is_empty() => Err(bad(path, "no certificate is in it")),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(bad(path, error)),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

fn bad(path: impl Into<PathBuf>, reason: impl ToString) -> TlsError {
    TlsError::Bad { path: path.into(), reason: reason.to_string() }
}

fn stamps(folder: &Path) -> Stamps {
    [CA_FILE, CERTIFICATE_FILE, KEY_FILE].map(|name| {
        let file = fs::metadata(folder.join(name)).ok()?;
        Some((file.ino(), file.mtime(), file.mtime_nsec(), file.len()))
    })
}

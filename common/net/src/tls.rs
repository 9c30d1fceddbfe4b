//! TLS credentials of a process: a directory with three PEM files, named as in Kubernetes secrets of the
//! type `kubernetes.io/tls`, and reloaded when they change.
//!
//! All processes of a job trust one certificate authority. The [`Role`] of a process is a DNS name in its
//! certificate, so that servers can authorize callers by role, and clients can verify the role of a
//! server on any machine.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use steadfast_common::role::{ANY_ROLE, Role};
use tracing::{info, warn};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// The authority's certificate, this process's certificate with intermediates, and its key.
pub const CA_FILE: &str = "ca.crt";
pub const CERTIFICATE_FILE: &str = "tls.crt";
pub const KEY_FILE: &str = "tls.key";

/// ALPN protocol names.
const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// Credentials cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: {reason}")]
    Bad { path: PathBuf, reason: String },
    #[error("{path} is a certificate of {found}; this is a {wanted}")]
    OtherRole { path: PathBuf, found: String, wanted: Role },
}

/// The TLS identity of a process: its credentials, or none, which means plaintext. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct TlsIdentity(Option<Arc<Credentials>>);

impl From<Credentials> for TlsIdentity {
    fn from(credentials: Credentials) -> Self {
        Self(Some(Arc::new(credentials)))
    }
}

impl TlsIdentity {
    /// Returns the credentials as they are in the files now, if there are any; see
    /// [`Credentials::current`].
    pub fn credentials(&self) -> Option<Arc<Loaded>> {
        self.0.as_ref().map(|credentials| credentials.current())
    }
}

/// The credentials in a directory, reloaded when the files change.
#[derive(Debug)]
pub struct Credentials {
    directory: PathBuf,
    /// The role that the certificate must have, if any.
    role: Option<Role>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The stamps of the files when they were last read, valid or not.
    seen: Stamps,
    good: Arc<Loaded>,
}

/// Inode, modification time and length of each file, which detect a change.
type Stamps = [Option<(u64, i64, i64, u64)>; 3];

/// Loaded credentials.
#[derive(Debug)]
pub struct Loaded {
    /// The roles in this process's certificate.
    pub roles: Vec<Role>,
    /// Expiry of this process's certificate, in seconds since 1970.
    pub not_after: i64,
    /// The configuration for gRPC: clients must present a certificate of the authority.
    pub server: Arc<ServerConfig>,
    /// The configuration for the admin port: clients without a certificate are accepted without a role.
    pub admin: Arc<ServerConfig>,
    pub client: Arc<ClientConfig>,
}

impl Credentials {
    /// Loads the credentials in `directory`.
    ///
    /// # Errors
    /// A message that names the file and the error.
    pub fn open(directory: &Path) -> Result<Self, TlsError> {
        // Taken before the files are read, so that a concurrent change causes a reload.
        let seen = stamps(directory);
        let good = Arc::new(Loaded::read(directory)?);
        let state = Mutex::new(State { seen, good });
        Ok(Self { directory: directory.to_owned(), role: None, state })
    }

    /// Loads the credentials in `directory` for a process of `role`.
    ///
    /// # Errors
    /// Returns the errors of [`Credentials::open`], and one if the certificate has another role.
    pub fn open_as(directory: &Path, role: Role) -> Result<Self, TlsError> {
        let credentials = Self::open(directory)?;
        credentials.current().demand(directory, role)?;
        Ok(Self { role: Some(role), ..credentials })
    }

    /// Returns the current credentials: those in the files, or the last valid ones if the files are
    /// invalid, for example while they are being written.
    pub fn current(&self) -> Arc<Loaded> {
        let mut state = self.state.lock().expect("no holder panics");
        let seen = stamps(&self.directory);
        if seen != state.seen {
            state.seen = seen;
            match self.read() {
                Ok(loaded) => {
                    info!(directory = %self.directory.display(), "reloaded certificates");
                    state.good = Arc::new(loaded);
                }
                Err(error) => warn!(%error, "cannot load new certificates; keeping the old ones"),
            }
        }
        state.good.clone()
    }
}

/// Whether clients without a certificate are accepted, without a role.
#[derive(Clone, Copy)]
enum ClientAuth {
    Required,
    Optional,
}

/// The contents of a directory.
struct Files {
    directory: PathBuf,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl Credentials {
    fn read(&self) -> Result<Loaded, TlsError> {
        let loaded = Loaded::read(&self.directory)?;
        if let Some(role) = self.role {
            loaded.demand(&self.directory, role)?;
        }
        Ok(loaded)
    }
}

impl Loaded {
    /// Checks that the certificate has the role `wanted`; a reload checks this as well.
    fn demand(&self, directory: &Path, wanted: Role) -> Result<(), TlsError> {
        if self.roles.contains(&wanted) {
            return Ok(());
        }
        let found = match self.roles.as_slice() {
            [] => "no role".to_owned(),
            roles => roles.iter().map(Role::to_string).collect::<Vec<_>>().join(", "),
        };
        Err(TlsError::OtherRole { path: directory.join(CERTIFICATE_FILE), found, wanted })
    }

    fn read(directory: &Path) -> Result<Self, TlsError> {
        let files = Files::read(directory)?;
        let own = described(&files.chain[0])
            .map_err(|reason| bad(directory.join(CERTIFICATE_FILE), reason))?;
        files.check()?;
        Ok(Self {
            roles: own.roles,
            not_after: own.not_after,
            server: files.server(ClientAuth::Required, HTTP2)?,
            admin: files.server(ClientAuth::Optional, HTTP1)?,
            client: files.client()?,
        })
    }
}

impl Files {
    fn read(directory: &Path) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        let path = directory.join(CA_FILE);
        for authority in certificates(&path)? {
            roots.add(authority).map_err(|error| bad(&path, error))?;
        }
        let path = directory.join(KEY_FILE);
        let key =
            PrivateKeyDer::from_pem_slice(&read(&path)?).map_err(|error| bad(&path, error))?;
        Ok(Self {
            directory: directory.to_owned(),
            roots: Arc::new(roots),
            chain: certificates(&directory.join(CERTIFICATE_FILE))?,
            key,
            provider: Arc::new(crypto()),
        })
    }

    /// Verifies that the certificate is valid now and signed by the authority.
    fn check(&self) -> Result<(), TlsError> {
        let roots = self.roots.clone();
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, self.provider.clone());
        let verifier =
            verifier.build().map_err(|error| bad(self.directory.join(CA_FILE), error))?;
        let name = ServerName::try_from(ANY_ROLE).expect("it is a DNS name");
        let (own, intermediates) = (&self.chain[0], &self.chain[1..]);
        let verified = verifier.verify_server_cert(own, intermediates, &name, &[], UnixTime::now());
        verified.map(|_| ()).map_err(|error| {
            bad(
                self.directory.join(CERTIFICATE_FILE),
                format!("not valid under {CA_FILE}: {error}"),
            )
        })
    }

    fn server(
        &self,
        client_auth: ClientAuth,
        protocol: &[u8],
    ) -> Result<Arc<ServerConfig>, TlsError> {
        let roots = self.roots.clone();
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, self.provider.clone());
        let verifier = match client_auth {
            ClientAuth::Required => verifier,
            ClientAuth::Optional => verifier.allow_unauthenticated(),
        };
        let verifier =
            verifier.build().map_err(|error| bad(self.directory.join(CA_FILE), error))?;
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| self.bad_key(&error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| self.bad_key(&error))?;
        config.alpn_protocols = vec![protocol.to_owned()];
        // No session resumption: it would accept a client whose certificate has expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    fn client(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| self.bad_key(&error))?
            .with_root_certificates(self.roots.clone())
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| self.bad_key(&error))?;
        Ok(Arc::new(config))
    }

    fn bad_key(&self, error: &rustls::Error) -> TlsError {
        bad(
            self.directory.join(KEY_FILE),
            format!("cannot be used with {CERTIFICATE_FILE}: {error}"),
        )
    }
}

/// Returns the cryptography provider that all processes use.
pub fn crypto() -> CryptoProvider {
    rustls::crypto::ring::default_provider()
}

/// Contents of a certificate.
#[derive(Clone, Debug)]
pub struct Described {
    pub roles: Vec<Role>,
    /// The DNS names and IP addresses in its subject alternative name.
    pub names: Vec<String>,
    /// Expiry of the certificate, in seconds since 1970.
    pub not_after: i64,
}

/// Parses a certificate (DER); does not verify it.
///
/// # Errors
/// If it is not a certificate.
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

/// Returns a DNS name or an IP address as text.
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

/// Parses the first certificate in a PEM file; does not verify it.
///
/// # Errors
/// A message that names the file and the error.
pub fn described_file(path: &Path) -> Result<Described, TlsError> {
    described(&certificates(path)?[0]).map_err(|reason| bad(path, reason))
}

/// Reads the certificates in a PEM file; at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match read {
        Ok(certificates) if certificates.is_empty() => Err(bad(path, "no certificate found")),
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

fn stamps(directory: &Path) -> Stamps {
    [CA_FILE, CERTIFICATE_FILE, KEY_FILE].map(|name| {
        let file = fs::metadata(directory.join(name)).ok()?;
        Some((file.ino(), file.mtime(), file.mtime_nsec(), file.len()))
    })
}

//! The certificate authority of a job and the certificates that it signs.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use steadfast_common::role::{ANY_ROLE, Role};
use steadfast_net::tls::{CA_FILE, CERTIFICATE_FILE, KEY_FILE, described_file};
use steadfast_process::{Failure, print_line};
use time::{Duration, OffsetDateTime};

use super::{InitArgs, RenewArgs};

/// The directory of the authority itself.
const AUTHORITY: &str = "ca";

/// The directory of the certificate that all etcd members share.
const ETCD: &str = "etcd";

/// Lifetime of the authority: long, because replacing it requires new files on every machine.
const AUTHORITY_DAYS: i64 = 3650;

/// Tolerance for clock skew: certificates are valid from this long before their creation.
const EARLIER: Duration = Duration::hours(1);

/// Names under which an etcd member is reached on its own machine.
const LOCAL: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Creates the authority and the certificates that are missing.
pub fn init(args: &InitArgs) -> Result<(), Failure> {
    let directory = args.dir.join(AUTHORITY);
    if !directory.join(CERTIFICATE_FILE).exists() {
        let key = key()?;
        let params = authority_params()?;
        let authority = params.self_signed(&key).map_err(broken)?;
        write(&directory, &key, &authority.pem(), &authority.pem())?;
        print_line(format_args!("made {}", directory.display()));
    }
    let authority = Authority::read(&args.dir)?;
    for (name, names) in wanted(args) {
        let directory = args.dir.join(name);
        if directory.join(CERTIFICATE_FILE).exists() {
            print_line(format_args!("kept {}", directory.display()));
            continue;
        }
        authority.issue(&directory, name, names, args.days)?;
        print_line(format_args!("made {}", directory.display()));
    }
    Ok(())
}

/// Issues new certificates for all directories except the authority's.
pub fn renew(args: &RenewArgs) -> Result<(), Failure> {
    let authority = Authority::read(&args.dir)?;
    let mut some = false;
    for name in Role::ALL.map(Role::name).into_iter().chain([ETCD]) {
        let directory = args.dir.join(name);
        let certificate = directory.join(CERTIFICATE_FILE);
        if !certificate.exists() {
            continue;
        }
        let old = described_file(&certificate).map_err(|it| Failure::invalid(it.to_string()))?;
        authority.issue(&directory, name, old.names, args.days)?;
        print_line(format_args!("made {}", directory.display()));
        some = true;
    }
    if some {
        return Ok(());
    }
    let dir = args.dir.display();
    Err(Failure::invalid(format!(
        "no certificates in {dir}; create them with `steadfast certs init`"
    )))
}

/// Returns the directory of each certificate with the host names and addresses that the certificate is for.
fn wanted(args: &InitArgs) -> Vec<(&'static str, Vec<String>)> {
    let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let mut wanted: Vec<_> = Role::ALL
        .into_iter()
        .map(|role| {
            let names = [owned(&[role.dns_name(), ANY_ROLE]), args.host.clone()].concat();
            (role.name(), names)
        })
        .collect();
    if !args.etcd_host.is_empty() {
        wanted.push((ETCD, [owned(&LOCAL), args.etcd_host.clone()].concat()));
    }
    wanted
}

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn read(dir: &Path) -> Result<Self, Failure> {
        let read = |name| {
            let path = dir.join(AUTHORITY).join(name);
            let text = fs::read_to_string(&path);
            text.map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))
        };
        let (pem, key) = (read(CERTIFICATE_FILE)?, read(KEY_FILE)?);
        let bad = |error: rcgen::Error| {
            let directory = dir.join(AUTHORITY);
            Failure::invalid(format!(
                "cannot use the authority in {}: {error}",
                directory.display()
            ))
        };
        let key = KeyPair::from_pem(&key).map_err(bad)?;
        let issuer = Issuer::from_ca_cert_pem(&pem, key).map_err(bad)?;
        Ok(Self { pem, issuer })
    }

    /// Issues a certificate for client and server use; its common name is the etcd user.
    fn issue(
        &self,
        directory: &Path,
        user: &str,
        names: Vec<String>,
        days: u32,
    ) -> Result<(), Failure> {
        let key = key()?;
        let mut params = CertificateParams::new(names).map_err(|error| {
            Failure::invalid(format!("invalid name for the certificate of {user}: {error}"))
        })?;
        params.distinguished_name.push(DnType::CommonName, user);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        lasts(&mut params, i64::from(days));
        let certificate = params.signed_by(&key, &self.issuer).map_err(broken)?;
        write(directory, &key, &certificate.pem(), &self.pem)
    }
}

fn authority_params() -> Result<CertificateParams, Failure> {
    let mut params = CertificateParams::new([]).map_err(broken)?;
    params.distinguished_name.push(DnType::CommonName, "steadfast job authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    lasts(&mut params, AUTHORITY_DAYS);
    Ok(params)
}

fn lasts(params: &mut CertificateParams, days: i64) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - EARLIER;
    params.not_after = now + Duration::days(days);
}

fn key() -> Result<KeyPair, Failure> {
    KeyPair::generate().map_err(broken)
}

fn broken(error: rcgen::Error) -> Failure {
    Failure::internal(format!("cannot create a certificate: {error}"))
}

/// Writes a directory's files, the certificate last: a reader of the new certificate finds the other new files.
fn write(
    directory: &Path,
    key: &KeyPair,
    certificate: &str,
    authority: &str,
) -> Result<(), Failure> {
    let failed = |error: &std::io::Error| {
        Failure::io(format!("cannot write certificates to {}", directory.display()), error)
    };
    fs::create_dir_all(directory).map_err(|error| failed(&error))?;
    let files = [
        (CA_FILE, authority.to_owned(), 0o644),
        (KEY_FILE, key.serialize_pem(), 0o600),
        (CERTIFICATE_FILE, certificate.to_owned(), 0o644),
    ];
    files
        .into_iter()
        .try_for_each(|(name, text, mode)| replace(&directory.join(name), &text, mode))
        .map_err(|error| failed(&error))
}

/// Replaces a file atomically.
fn replace(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    let next: PathBuf = path.with_extension("new");
    let _ = fs::remove_file(&next);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&next)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&next, path)
}

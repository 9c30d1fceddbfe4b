//! Transport security of a process: mutual TLS, or plaintext. Plaintext is limited to loopback unless a
//! flag allows it on other addresses.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_common::role::Role;
use steadfast_net::TlsIdentity;
use steadfast_net::tls::{Credentials, TlsError};
use tracing::warn;

use crate::Failure;

/// Minimum length of a token.
const TOKEN_MIN: usize = 16;

/// The credentials of this process.
#[derive(Clone, Debug, Default, Args)]
pub struct TlsArgs {
    /// Directory with the job's certificate authority (`ca.crt`) and this process's certificate and key
    /// (`tls.crt`, `tls.key`); `steadfast certs init` creates one for each role.
    #[arg(long, value_name = "DIR")]
    pub tls: Option<PathBuf>,
}

/// Settings of transport security and authentication.
#[derive(Clone, Debug, Default, Args)]
pub struct SecurityArgs {
    #[command(flatten)]
    pub tls: TlsArgs,
    /// Serve on addresses other than loopback without TLS: any client that can connect can read and
    /// change everything.
    #[arg(long, conflicts_with = "tls")]
    pub insecure_allow_plaintext: bool,
    /// File with the token that gives read access to metrics, status and the page on an admin port with
    /// TLS.
    #[arg(long, value_name = "FILE", requires = "tls")]
    pub admin_token_file: Option<PathBuf>,
}

/// How other processes can connect to this one.
#[derive(Clone, Debug)]
pub enum Exposure {
    /// Processes of this machine can connect, without TLS.
    Loopback,
    /// Processes of any machine can connect, without TLS.
    Plaintext,
    /// Processes can connect with mutual TLS.
    Tls(TlsIdentity),
}

impl Exposure {
    /// Returns the TLS identity of the process. Without TLS, it is the default one, which means plaintext.
    pub fn identity(&self) -> TlsIdentity {
        match self {
            Self::Loopback | Self::Plaintext => TlsIdentity::default(),
            Self::Tls(identity) => identity.clone(),
        }
    }
}

impl TlsArgs {
    /// Loads the identity of a process that is only a client.
    ///
    /// # Errors
    /// If the credentials cannot be loaded.
    pub fn identity(&self) -> Result<TlsIdentity, Failure> {
        let Some(directory) = &self.tls else { return Ok(TlsIdentity::default()) };
        Ok(Credentials::open(directory).map_err(|error| failure(&error))?.into())
    }
}

impl SecurityArgs {
    /// Returns the exposure of a process of this `role`.
    ///
    /// # Errors
    /// If its credentials cannot be loaded.
    pub fn exposure(&self, role: Role) -> Result<Exposure, Failure> {
        Ok(match &self.tls.tls {
            Some(directory) => {
                let credentials = Credentials::open_as(directory, role);
                Exposure::Tls(credentials.map_err(|error| failure(&error))?.into())
            }
            None if self.insecure_allow_plaintext => {
                warn!(
                    "INSECURE: no TLS; any client that can connect can read and change everything"
                );
                Exposure::Plaintext
            }
            None => Exposure::Loopback,
        })
    }

    /// Returns the token of the admin port, if there is one.
    ///
    /// # Errors
    /// If the file cannot be read, or the token is too short.
    pub fn admin_token(&self) -> Result<Option<String>, Failure> {
        let Some(path) = &self.admin_token_file else { return Ok(None) };
        let token = secret(path, "token file")?;
        if token.len() < TOKEN_MIN {
            let message = format!(
                "the token in {} is shorter than {TOKEN_MIN} characters; generate one with `openssl rand -hex 32`",
                path.display()
            );
            return Err(Failure::invalid(message));
        }
        Ok(Some(token))
    }
}

/// Reads a file with a secret, without its final line break; `what` names the file in messages.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn secret(path: &Path, what: &str) -> Result<String, Failure> {
    let text = fs::read_to_string(path).map_err(|error| {
        Failure::io(format!("cannot read the {what} {}", path.display()), &error)
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// Checks that a port may be opened on `address`, which `flag` sets.
///
/// # Errors
/// If other machines could reach it without TLS and that is not allowed.
pub(crate) fn may_listen(
    address: SocketAddr,
    flag: &str,
    exposure: &Exposure,
) -> Result<(), Failure> {
    match exposure {
        Exposure::Loopback if !address.ip().is_loopback() => Err(Failure::invalid(format!(
            "{flag} {address} is reachable from other machines without TLS: set --tls (`steadfast certs init` \
             creates the certificates), or --insecure-allow-plaintext if any client that can connect may read \
             and change everything"
        ))),
        Exposure::Loopback | Exposure::Plaintext | Exposure::Tls(_) => Ok(()),
    }
}

fn failure(error: &TlsError) -> Failure {
    let kind = match error {
        TlsError::Read { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
            ErrorKind::Denied
        }
        TlsError::Read { .. } | TlsError::Bad { .. } | TlsError::OtherRole { .. } => {
            ErrorKind::Invalid
        }
    };
    Failure::new(kind, format!("{error} (--tls)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// F50: plaintext on other addresses than loopback needs an explicit flag.
    #[test]
    fn only_loopback_is_served_without_tls_unless_allowed() {
        let may_listen =
            |address: &str| may_listen(address.parse().unwrap(), "--listen", &Exposure::Loopback);
        assert!(may_listen("127.0.0.1:7000").is_ok());
        assert!(may_listen("[::1]:7000").is_ok());
        for open in ["0.0.0.0:7000", "[::]:7000", "192.0.2.1:7000"] {
            let refused = may_listen(open).unwrap_err().message;
            assert!(refused.contains("--tls") && refused.contains(open), "{refused}");
        }
    }

    #[test]
    fn a_token_that_can_be_guessed_is_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let args = SecurityArgs {
            admin_token_file: Some(file.path().to_owned()),
            ..SecurityArgs::default()
        };
        std::fs::write(file.path(), "123\n").unwrap();
        assert!(args.admin_token().unwrap_err().message.contains("shorter"));
        std::fs::write(file.path(), "0123456789abcdef\n").unwrap();
        assert_eq!(args.admin_token().unwrap().as_deref(), Some("0123456789abcdef"));
    }
}

//! Transport security of a process: mutual TLS, or plaintext. Plaintext is limited to loopback unless a
//! flag allows it on other addresses.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_host::role::Role;
use steadfast_host::tls::{self, Credentials, Exposure, TlsError};
use tracing::warn;

use crate::Failure;

/// Minimum length of a token.
const TOKEN_MIN: usize = 16;

/// The credentials of this process.
#[derive(Clone, Debug, Default, Args)]
pub struct TlsArgs {
    /// Folder with the job's certificate authority (`ca.crt`) and this process's certificate and key
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

impl TlsArgs {
    /// Loads the credentials of a process that is only a client, if the flag is set.
    ///
    /// # Errors
    /// If they cannot be loaded.
    pub fn decide(&self) -> Result<(), Failure> {
        if let Some(folder) = &self.tls {
            let credentials = Credentials::open(folder).map_err(|error| failure(&error))?;
            tls::decide(Exposure::Tls(Arc::new(credentials)));
        }
        Ok(())
    }
}

impl SecurityArgs {
    /// Sets the exposure of this process, which has this `role`.
    ///
    /// # Errors
    /// If its credentials cannot be loaded.
    pub fn decide(&self, role: Role) -> Result<(), Failure> {
        match &self.tls.tls {
            Some(folder) => {
                let credentials =
                    Credentials::open_as(folder, role).map_err(|error| failure(&error))?;
                tls::decide(Exposure::Tls(Arc::new(credentials)));
            }
            None if self.insecure_allow_plaintext => {
                warn!(
                    "INSECURE: no TLS; any client that can connect can read and change everything"
                );
                tls::decide(Exposure::Plaintext);
            }
            None => {}
        }
        Ok(())
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
pub(crate) fn may_listen(address: SocketAddr, flag: &str) -> Result<(), Failure> {
    match tls::exposure() {
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
    fn only_loopback_is_served_in_the_clear_unless_somebody_says_so() {
        assert!(may_listen("127.0.0.1:7000".parse().unwrap(), "--listen").is_ok());
        assert!(may_listen("[::1]:7000".parse().unwrap(), "--listen").is_ok());
        for open in ["0.0.0.0:7000", "[::]:7000", "192.0.2.1:7000"] {
            let refused = may_listen(open.parse().unwrap(), "--listen").unwrap_err().message;
            assert!(refused.contains("--tls") && refused.contains(open), "{refused}");
        }
    }

    #[test]
    fn a_token_that_can_be_guessed_is_refused() {
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

//! The login of an etcd user with a password. etcd's tokens expire, and lose their validity when users change
//! or etcd restarts; the process then logs in again, with the password that the file has by then.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use etcd_client::Client;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use steadfast_host::time::{Instant, timeout};
use tracing::{info, warn};

use crate::CoordError;
use crate::etcd::CALL_TIMEOUT;

/// Time for which a refused login is not final, if an earlier one succeeded: a password is changed in etcd
/// and in the file one after the other.
const CHANGE_MAX: Duration = Duration::from_secs(60);

/// Messages of etcd with which it refuses a token, beside the code `Unauthenticated`: the users have changed since
/// a JSON web token was made; authentication was enabled after the process connected.
const STALE: [&str; 2] = ["revision of auth store is old", "user name is empty"];

/// The user of a process, and its login that is in progress, if any. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Login(Arc<Inner>);

struct Inner {
    user: String,
    password_file: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    attempt: Option<Attempt>,
    /// Number of logins that have succeeded.
    successes: u64,
    /// Since when all logins have been refused.
    refused_since: Option<Instant>,
}

/// A login, shared by all calls that found the token stale: etcd spends much time on each password.
type Attempt = Shared<BoxFuture<'static, Result<(), Arc<CoordError>>>>;

impl Login {
    pub(crate) fn new(user: &str, password_file: &Path) -> Self {
        Self(Arc::new(Inner {
            user: user.to_owned(),
            password_file: password_file.to_owned(),
            state: Mutex::default(),
        }))
    }

    /// Returns how many logins have succeeded: the number of the token that a call is sent with.
    pub(crate) fn token(&self) -> u64 {
        self.0.state.lock().expect("no holder panics").successes
    }

    /// Logs in, or waits for the login in progress. Does nothing if there is a newer token than `stale`, that of a
    /// refused call.
    ///
    /// # Errors
    /// If the password cannot be read, etcd refuses it, or etcd does not answer.
    pub(crate) async fn renew(&self, client: &Client, stale: u64) -> Result<(), CoordError> {
        match self.attempt(client, stale) {
            Some(attempt) => attempt.await.map_err(CoordError::Login),
            None => Ok(()),
        }
    }

    fn attempt(&self, client: &Client, stale: u64) -> Option<Attempt> {
        let mut state = self.0.state.lock().expect("no holder panics");
        if stale < state.successes {
            return None;
        }
        Some(match &state.attempt {
            Some(attempt) if attempt.peek().is_none() => attempt.clone(),
            _ => {
                let login = self.clone().log_in(client.clone()).map(|it| it.map_err(Arc::new));
                state.attempt.insert(login.boxed().shared()).clone()
            }
        })
    }

    async fn log_in(self, mut client: Client) -> Result<(), CoordError> {
        let credentials = (self.0.user.clone(), password(&self.0.password_file)?);
        let answer = match timeout(CALL_TIMEOUT, client.update_user(Some(credentials))).await {
            Ok(answer) => answer,
            Err(_) => {
                return Err(CoordError::TimedOut { operation: "login", after: CALL_TIMEOUT });
            }
        };
        let error = match answer {
            Ok(()) => {
                self.accepted();
                return Ok(());
            }
            Err(error) => error,
        };
        match Refusal::of(&error) {
            Some(Refusal::NotEnabled) => {
                warn!("etcd has no users: authentication is off");
                Ok(())
            }
            Some(Refusal::Credentials) => Err(self.refused(&error)),
            None => Err(CoordError::Refused { operation: "login", source: Box::new(error) }),
        }
    }

    fn accepted(&self) {
        let mut state = self.0.state.lock().expect("no holder panics");
        if 0 < state.successes {
            info!(user = self.0.user, "logged in to etcd again");
        }
        (state.successes, state.refused_since) = (state.successes + 1, None);
    }

    fn refused(&self, error: &etcd_client::Error) -> CoordError {
        let mut state = self.0.state.lock().expect("no holder panics");
        let since = *state.refused_since.get_or_insert_with(Instant::now);
        CoordError::LoginRefused {
            user: self.0.user.clone(),
            password_file: self.0.password_file.display().to_string(),
            reason: crate::error::refusal(error),
            is_final: state.successes == 0 || CHANGE_MAX <= since.elapsed(),
        }
    }
}

/// The reasons for which etcd refuses a login.
enum Refusal {
    NotEnabled,
    Credentials,
}

impl Refusal {
    fn of(error: &etcd_client::Error) -> Option<Self> {
        let etcd_client::Error::GRpcStatus(status) = error else { return None };
        if status.message().contains("authentication is not enabled") {
            return Some(Self::NotEnabled);
        }
        status.message().contains("authentication failed").then_some(Self::Credentials)
    }
}

/// Returns whether etcd refused a call because of its token, and not because the user lacks a permission.
pub(crate) fn is_stale(error: &etcd_client::Error) -> bool {
    match error {
        etcd_client::Error::GRpcStatus(status) => {
            status.code() == tonic::Code::Unauthenticated
                || STALE.iter().any(|text| status.message().contains(text))
        }
        _ => false,
    }
}

/// Reads a password, without a final line break.
fn password(path: &Path) -> Result<String, CoordError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.trim_end_matches(['\r', '\n']).to_owned()),
        Err(error) => {
            Err(CoordError::BadFile { path: path.display().to_string(), reason: error.to_string() })
        }
    }
}

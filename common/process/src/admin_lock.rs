//! Authentication of requests to an admin port.

use axum::http::HeaderValue;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use steadfast_auth::Peer;
use steadfast_common::role::Role;
use subtle::ConstantTimeEq;

/// Makes a browser prompt for the token, as the password of any user name.
pub(crate) const CHALLENGE: &str = "Basic realm=\"steadfast\", charset=\"UTF-8\"";

/// Accepts administrators, and clients with the token.
pub(crate) struct Lock {
    token: Option<String>,
}

impl Lock {
    pub(crate) fn new(token: Option<String>) -> Self {
        Self { token }
    }

    /// Returns whether a request is authorized, by the certificate of its peer or by its token.
    pub(crate) fn opens(&self, peer: &Peer, authorization: Option<&HeaderValue>) -> bool {
        match peer {
            Peer::Anonymous => true,
            Peer::Authenticated(roles) if roles.contains(&Role::Admin) => true,
            Peer::Authenticated(_) => {
                let shown = authorization.and_then(|it| token(it.to_str().ok()?));
                self.token
                    .as_ref()
                    .zip(shown)
                    .is_some_and(|(token, shown)| token.as_bytes().ct_eq(shown.as_bytes()).into())
            }
        }
    }
}

/// Returns the token in an `Authorization` header: a bearer token or a basic password.
fn token(header: &str) -> Option<String> {
    let (scheme, rest) = header.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.to_owned());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = String::from_utf8(STANDARD.decode(rest).ok()?).ok()?;
    pair.split_once(':').map(|(_, password)| password.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// F50: requests without a permitted certificate or the token are refused.
    #[test]
    fn only_an_administrator_or_the_token_grants_access() {
        let lock = Lock::new(Some("0123456789abcdef".to_owned()));
        let trainer = Peer::of(Role::Trainer);
        let anonymous = Peer::Authenticated([].into());
        let opens = |peer: &Peer, header: &str| {
            lock.opens(peer, Some(&HeaderValue::from_str(header).unwrap()))
        };
        assert!(lock.opens(&Peer::Anonymous, None) && lock.opens(&Peer::of(Role::Admin), None));
        assert!(!lock.opens(&anonymous, None) && !lock.opens(&trainer, None));
        assert!(opens(&anonymous, "Bearer 0123456789abcdef"));
        let password = STANDARD.encode("any:0123456789abcdef");
        assert!(opens(&anonymous, &format!("Basic {password}")));
        for wrong in ["Bearer 0123456789abcdeg", "Bearer ", "Bearer", "Basic !", "0123456789abcdef"]
        {
            assert!(!opens(&trainer, wrong), "{wrong}");
        }
        assert!(!Lock::new(None).opens(&anonymous, Some(&HeaderValue::from_static("Bearer "))));
    }
}

//! What opens an admin port.

use axum::http::HeaderValue;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use steadfast_host::incoming::Peer;
use steadfast_host::role::Role;
use subtle::ConstantTimeEq;

/// Has a browser ask for the token: as a password, with any name.
pub(crate) const CHALLENGE: &str = "Basic realm=\"steadfast\", charset=\"UTF-8\"";

/// Opens for administrators, and for whoever has the token.
pub(crate) struct Lock {
    token: Option<String>,
}

impl Lock {
    pub(crate) fn new(token: Option<String>) -> Self {
        Self { token }
    }

    /// Whether somebody may come in, by certificate or by what its request brings.
    pub(crate) fn opens(&self, peer: &Peer, authorization: Option<&HeaderValue>) -> bool {
        match peer {
            Peer::Unasked => true,
            Peer::Known(roles) if roles.contains(&Role::Admin) => true,
            Peer::Known(_) => {
                let shown = authorization.and_then(|it| token(it.to_str().ok()?));
                self.token
                    .as_ref()
                    .zip(shown)
                    .is_some_and(|(token, shown)| token.as_bytes().ct_eq(shown.as_bytes()).into())
            }
        }
    }
}

/// The token in an `Authorization` header: a bearer, or a password.
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

    /// F50: without the right certificate or token nobody comes in.
    #[test]
    fn only_an_administrator_or_the_token_opens_it() {
        let lock = Lock::new(Some("0123456789abcdef".to_owned()));
        let trainer = Peer::of(Role::Trainer);
        let nobody = Peer::Known([].into());
        let opens = |peer: &Peer, header: &str| {
            lock.opens(peer, Some(&HeaderValue::from_str(header).unwrap()))
        };
        assert!(lock.opens(&Peer::Unasked, None) && lock.opens(&Peer::of(Role::Admin), None));
        assert!(!lock.opens(&nobody, None) && !lock.opens(&trainer, None));
        assert!(opens(&nobody, "Bearer 0123456789abcdef"));
        let password = STANDARD.encode("anybody:0123456789abcdef");
        assert!(opens(&nobody, &format!("Basic {password}")));
        for wrong in ["Bearer 0123456789abcdeg", "Bearer ", "Bearer", "Basic !", "0123456789abcdef"]
        {
            assert!(!opens(&trainer, wrong), "{wrong}");
        }
        assert!(!Lock::new(None).opens(&nobody, Some(&HeaderValue::from_static("Bearer "))));
    }
}

//! Parses the address of a store: a local path or a URL.

use std::path::{Component, PathBuf};

use object_store::path::Path;
use url::Url;

use crate::error::StoreError;

/// A store, and a valid path in it.
#[derive(Debug)]
pub(crate) struct Address {
    /// `scheme://authority/`, without secrets.
    pub base: Url,
    pub path: Path,
}

/// The meaning of `?` in a URL.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QuestionMark {
    /// The start of a query, which no store supports.
    Refused,
    /// One character of a name.
    Wildcard,
}

impl Address {
    /// Parses `text`: a URL if it contains `://`, otherwise a path.
    pub fn parse(text: &str, question_mark: QuestionMark) -> Result<Self, StoreError> {
        match text.split_once("://") {
            Some((scheme, rest)) => Self::from_url(text, scheme, rest, question_mark),
            None => Self::from_path(text),
        }
    }

    fn from_url(
        text: &str,
        scheme: &str,
        rest: &str,
        question_mark: QuestionMark,
    ) -> Result<Self, StoreError> {
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if let Some((userinfo, host)) = authority.rsplit_once('@')
            && (userinfo.contains(':') || scheme.starts_with("http"))
        {
            return Err(StoreError::PasswordInUrl { url: format!("{scheme}://{host}/{path}") });
        }
        let bad = |reason: &str| StoreError::BadUrl {
            // A query may contain a signature, which is a secret.
            url: text.split(['?', '#']).next().unwrap_or_default().to_owned(),
            reason: reason.to_owned(),
        };
        match question_mark {
            QuestionMark::Refused if rest.contains('?') => {
                return Err(bad("it has a query (write %3F for a literal question mark)"));
            }
            QuestionMark::Refused | QuestionMark::Wildcard => {}
        }
        if rest.contains('#') {
            return Err(bad("it has a fragment (write %23 for a literal `#`)"));
        }
        let base = Url::parse(&format!("{scheme}://{authority}/"))
            .map_err(|error| bad(&error.to_string()))?;
        let path = Path::from_url_path(path).map_err(|error| bad(&error.to_string()))?;
        Ok(Self { base, path })
    }

    fn from_path(text: &str) -> Result<Self, StoreError> {
        let bad = |reason: String| StoreError::BadUrl { url: text.to_owned(), reason };
        let absolute = std::path::absolute(text).map_err(|error| bad(error.to_string()))?;
        let resolved = without_parent_components(absolute);
        let resolved = resolved.to_str().ok_or_else(|| bad("it is not UTF-8".to_owned()))?;
        let path = Path::parse(resolved).map_err(|error| bad(error.to_string()))?;
        let base = Url::parse("file:///").expect("a constant");
        Ok(Self { base, path })
    }
}

/// Resolves each `..` like the operating system: after the symbolic links before it.
fn without_parent_components(path: PathBuf) -> PathBuf {
    let mut resolved = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                resolved = std::fs::canonicalize(&resolved).unwrap_or(resolved);
                resolved.pop();
            }
            Component::Prefix(_)
            | Component::RootDir
            | Component::CurDir
            | Component::Normal(_) => {
                resolved.push(component);
            }
        }
    }
    resolved
}

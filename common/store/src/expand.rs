//! Expands wildcards in paths and URLs.

use std::time::SystemTime;

use glob::{MatchOptions, Pattern};
use object_store::path::Path;

use crate::address::{Address, QuestionMark};
use crate::error::StoreError;
use crate::location::{Listed, Location};
use crate::root::Root;

/// Lists the objects that match `pattern`, sorted by path.
///
/// `*` matches any characters within one part of the path, `?` one character, and a part `**` any number
/// of parts. Only directories that can contain a match are listed. Without a wildcard, the result is that one
/// location, whether or not there is an object.
///
/// # Errors
/// If the pattern is invalid, the store fails, or nothing matches.
pub async fn expand(pattern: &str) -> Result<Vec<Location>, StoreError> {
    let address = Address::parse(pattern, QuestionMark::Wildcard)?;
    if !address.path.as_ref().contains(['*', '?']) {
        return Ok(vec![Location::new(Root::shared(&address.base)?, address.path)]);
    }
    let listed = list_matching(pattern).await?;
    if listed.is_empty() {
        return Err(StoreError::NoMatch { pattern: pattern.to_owned() });
    }
    Ok(listed.into_iter().map(|it| it.location).collect())
}

/// Lists the objects that match `pattern` as they are now, sorted by path, see [`expand`]; none without a wildcard.
///
/// # Errors
/// If the pattern is invalid, or the store fails.
pub async fn list_matching(pattern: &str) -> Result<Vec<Listed>, StoreError> {
    let address = Address::parse(pattern, QuestionMark::Wildcard)?;
    let root = Root::shared(&address.base)?;
    let parts: Vec<String> = address.path.parts().map(|part| part.as_ref().to_owned()).collect();
    let Some(first) = parts.iter().position(|part| part.contains(['*', '?'])) else {
        return Ok(Vec::new());
    };

    let start = Path::parse(parts[..first].join("/")).expect("parts of a valid path");
    let mut level = vec![Location::new(root, start)];
    let mut found = Vec::new();
    for index in first..parts.len() {
        let rest = &parts[index..];
        if rest[0] == "**" {
            found = everything_below(&level, &matcher(pattern, &rest.join("/"))?).await?;
            break;
        }
        level = match rest {
            [last] => {
                found = objects_in(&level, &matcher(pattern, last)?).await?;
                break;
            }
            [part, ..] if part.contains(['*', '?']) => {
                directories_in(&level, &matcher(pattern, part)?).await?
            }
            [part, ..] => level.iter().map(|directory| directory.join(part)).collect(),
            [] => level,
        };
    }
    found.sort_by(|a, b| a.location.path().cmp(b.location.path()));
    Ok(found)
}

async fn everything_below(
    directories: &[Location],
    matcher: &Matcher,
) -> Result<Vec<Listed>, StoreError> {
    let mut found = Vec::new();
    for directory in directories {
        let objects = directory.list_with(|meta| (meta.size, meta.last_modified.into())).await?;
        let objects = objects.into_iter().map(|(name, (size, modified))| (name, size, modified));
        found.extend(matching(directory, objects, matcher));
    }
    Ok(found)
}

async fn objects_in(
    directories: &[Location],
    matcher: &Matcher,
) -> Result<Vec<Listed>, StoreError> {
    let mut found = Vec::new();
    for directory in directories {
        let objects = directory.list_directory().await?.objects;
        found.extend(matching(directory, objects, matcher));
    }
    Ok(found)
}

/// The objects of a directory that match, by name, size and modification time.
fn matching(
    directory: &Location,
    objects: impl IntoIterator<Item = (String, u64, SystemTime)>,
    matcher: &Matcher,
) -> impl Iterator<Item = Listed> {
    let matching = objects.into_iter().filter(|(name, ..)| matcher.is_match(name));
    matching.map(|(name, size_bytes, modified)| Listed {
        location: directory.join(&name),
        size_bytes,
        modified,
    })
}

async fn directories_in(
    directories: &[Location],
    matcher: &Matcher,
) -> Result<Vec<Location>, StoreError> {
    let mut found = Vec::new();
    for directory in directories {
        let inner = directory.list_directory().await?.directories;
        let matching = inner.iter().filter(|name| matcher.is_match(name));
        found.extend(matching.map(|name| directory.join(name)));
    }
    Ok(found)
}

/// A glob in which only `*`, `?` and `**` are special.
struct Matcher(Pattern);

impl Matcher {
    fn is_match(&self, name: &str) -> bool {
        let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
        self.0.matches_with(name, options)
    }
}

fn matcher(pattern: &str, glob: &str) -> Result<Matcher, StoreError> {
    // Brackets are the only other special characters.
    Pattern::new(&glob.replace('[', "[[]"))
        .map(Matcher)
        .map_err(|error| StoreError::BadUrl { url: pattern.to_owned(), reason: error.to_string() })
}

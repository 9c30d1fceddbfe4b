//! Expands wildcards in paths and URLs.

use glob::{MatchOptions, Pattern};
use object_store::path::Path;

use crate::address::{Address, QuestionMark};
use crate::error::StoreError;
use crate::location::Location;
use crate::root::Root;

/// Lists the objects that match `pattern`, sorted by path.
///
/// `*` matches any characters within one part of the path, `?` one character, and a part `**` any number
/// of parts. Only directories that can contain a match are listed. Without a wildcard, the result is that one
/// location, whether or not there is an object.
pub async fn expand(pattern: &str) -> Result<Vec<Location>, StoreError> {
    let address = Address::parse(pattern, QuestionMark::Wildcard)?;
    let root = Root::shared(&address.base)?;
    let parts: Vec<String> = address.path.parts().map(|part| part.as_ref().to_owned()).collect();
    let Some(first) = parts.iter().position(|part| part.contains(['*', '?'])) else {
        return Ok(vec![Location::new(root, address.path)]);
    };

    let start = Path::parse(parts[..first].join("/")).expect("parts of a valid path");
    let mut level = vec![Location::new(root, start)];
    for index in first..parts.len() {
        let rest = &parts[index..];
        if rest[0] == "**" {
            level = everything_below(&level, &matcher(pattern, &rest.join("/"))?).await?;
            break;
        }
        level = match rest {
            [last] => objects_in(&level, &matcher(pattern, last)?).await?,
            [part, ..] if part.contains(['*', '?']) => {
                directories_in(&level, &matcher(pattern, part)?).await?
            }
            [part, ..] => level.iter().map(|directory| directory.join(part)).collect(),
            [] => level,
        };
    }
    if level.is_empty() {
        return Err(StoreError::NoMatch { pattern: pattern.to_owned() });
    }
    level.sort_by(|a, b| a.path().cmp(b.path()));
    Ok(level)
}

async fn everything_below(
    directories: &[Location],
    matcher: &Matcher,
) -> Result<Vec<Location>, StoreError> {
    let mut found = Vec::new();
    for directory in directories {
        let objects = directory.list().await?;
        let matching = objects.iter().filter(|(name, _)| matcher.is_match(name));
        found.extend(matching.map(|(name, _)| directory.join(name)));
    }
    Ok(found)
}

async fn objects_in(
    directories: &[Location],
    matcher: &Matcher,
) -> Result<Vec<Location>, StoreError> {
    let mut found = Vec::new();
    for directory in directories {
        let objects = directory.list_directory().await?.objects;
        let matching = objects.iter().filter(|name| matcher.is_match(name));
        found.extend(matching.map(|name| directory.join(name)));
    }
    Ok(found)
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

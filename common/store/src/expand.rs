//! Expands wildcards in paths and URLs.

use glob::{MatchOptions, Pattern};
use object_store::path::Path;

use crate::address::{Address, QuestionMark};
use crate::error::StoreError;
use crate::listing::{Depth, Object, Odd};
use crate::location::{Listed, Location};
use crate::root::Root;

/// The locations that a pattern stands for.
#[derive(Debug, Default)]
pub struct Expanded {
    /// The locations, sorted by path.
    pub locations: Vec<Location>,
    /// Matching names that cannot be paths, as they can be shown, with the directory before them.
    pub skipped: Vec<String>,
}

/// The objects that match a pattern at the moment.
#[derive(Debug, Default)]
pub struct Matching {
    /// The objects, sorted by path.
    pub objects: Vec<Listed>,
    /// See [`Expanded::skipped`].
    pub skipped: Vec<String>,
}

/// Lists the objects that match `pattern`, sorted by path.
///
/// `*` matches any characters within one part of the path, `?` one character, and a part `**` any number
/// of parts; none matches a dot at the beginning of a name. Only directories that can contain a match are listed.
/// Without a wildcard, the result is that one location, whether or not there is an object.
///
/// # Errors
/// If the pattern is invalid, the store fails, or nothing matches.
pub async fn expand(pattern: &str) -> Result<Expanded, StoreError> {
    let address = Address::parse(pattern, QuestionMark::Wildcard)?;
    if !address.path.as_ref().contains(['*', '?']) {
        let location = Location::new(Root::shared(&address.base)?, address.path);
        return Ok(Expanded { locations: vec![location], skipped: vec![] });
    }
    let Matching { objects, skipped } = list_matching(pattern).await?;
    match (objects.is_empty(), skipped.first()) {
        (true, None) => Err(StoreError::NoMatch { pattern: pattern.to_owned() }),
        (true, Some(name)) => {
            Err(StoreError::OddName { pattern: pattern.to_owned(), name: name.clone() })
        }
        (false, _) => {
            Ok(Expanded { locations: objects.into_iter().map(|it| it.location).collect(), skipped })
        }
    }
}

/// Lists the objects that match `pattern` as they are now, sorted by path, see [`expand`]. Returns no objects without a
/// wildcard.
///
/// # Errors
/// If the pattern is invalid, or the store fails.
pub async fn list_matching(pattern: &str) -> Result<Matching, StoreError> {
    let address = Address::parse(pattern, QuestionMark::Wildcard)?;
    let root = Root::shared(&address.base)?;
    let parts: Vec<String> = address.path.parts().map(|part| part.as_ref().to_owned()).collect();
    let mut found = Matching::default();
    let Some(first) = parts.iter().position(|part| part.contains(['*', '?'])) else {
        return Ok(found);
    };

    let start = Path::parse(parts[..first].join("/")).expect("parts of a valid path");
    let mut level = vec![Location::new(root, start)];
    for index in first..parts.len() {
        let rest = &parts[index..];
        if rest[0] == "**" {
            let matcher = matcher(pattern, &rest.join("/"))?;
            found.add_objects(&level, Depth::All, &matcher).await?;
            break;
        }
        level = match rest {
            [last] => {
                found.add_objects(&level, Depth::One, &matcher(pattern, last)?).await?;
                break;
            }
            [part, ..] if part.contains(['*', '?']) => {
                found.directories_in(&level, &matcher(pattern, part)?).await?
            }
            [part, ..] => level.iter().map(|directory| directory.join(part)).collect(),
            [] => level,
        };
    }
    found.objects.sort_by(|a, b| a.location.path().cmp(b.location.path()));
    found.skipped.sort();
    Ok(found)
}

impl Matching {
    async fn add_objects(
        &mut self,
        directories: &[Location],
        depth: Depth,
        matcher: &Matcher,
    ) -> Result<(), StoreError> {
        for directory in directories {
            let listing = directory.listing(depth).await?;
            let odd = listing.odd.iter().filter(|odd| could_hide(odd, depth, matcher));
            self.add_skipped(directory, odd);
            for Object { name, size_bytes, modified } in listing.objects {
                if matcher.is_match(&name) {
                    self.objects.push(Listed {
                        location: directory.join(&name),
                        size_bytes,
                        modified,
                    });
                }
            }
        }
        Ok(())
    }

    async fn directories_in(
        &mut self,
        directories: &[Location],
        matcher: &Matcher,
    ) -> Result<Vec<Location>, StoreError> {
        let mut found = Vec::new();
        for directory in directories {
            let listing = directory.listing(Depth::One).await?;
            let odd = listing.odd.iter().filter(|odd| match odd {
                Odd::Object(_) => false,
                Odd::Directory(name) => matcher.is_match(&without_empty_parts(name)),
            });
            self.add_skipped(directory, odd);
            let matching = listing.directories.iter().filter(|name| matcher.is_match(name));
            found.extend(matching.map(|name| directory.join(name)));
        }
        Ok(found)
    }

    fn add_skipped<'a>(&mut self, directory: &Location, odd: impl Iterator<Item = &'a Odd>) {
        let directory = directory.url().trim_end_matches('/');
        self.skipped.extend(odd.map(|odd| format!("{directory}/{}", odd.name())));
    }
}

/// Returns whether an object that matches has this name, or may be in a directory with this name.
fn could_hide(odd: &Odd, depth: Depth, matcher: &Matcher) -> bool {
    match (odd, depth) {
        (Odd::Object(name), _) => matcher.is_match(&without_empty_parts(name)),
        (Odd::Directory(_), Depth::One) => false,
        (Odd::Directory(_), Depth::All) => true,
    }
}

/// Removes the empty parts of a name, which are what makes some names odd.
fn without_empty_parts(name: &str) -> String {
    name.split('/').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/")
}

/// A glob in which only `*`, `?` and `**` are special.
struct Matcher(Pattern);

impl Matcher {
    fn is_match(&self, name: &str) -> bool {
        let options = MatchOptions {
            require_literal_separator: true,
            require_literal_leading_dot: true,
            ..MatchOptions::new()
        };
        self.0.matches_with(name, options)
    }
}

fn matcher(pattern: &str, glob: &str) -> Result<Matcher, StoreError> {
    // Brackets are the only other special characters.
    Pattern::new(&glob.replace('[', "[[]"))
        .map(Matcher)
        .map_err(|error| StoreError::BadUrl { url: pattern.to_owned(), reason: error.to_string() })
}

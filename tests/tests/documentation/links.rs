//! Checks links between pages, with the anchors that GitHub generates for headings.

use std::collections::{BTreeMap, BTreeSet};

use crate::pages::{Page, split_code};

/// Returns a message for each link whose file, directory or heading does not exist.
pub fn dead(pages: &[Page], tracked: &[String]) -> Vec<String> {
    let anchors: BTreeMap<&str, BTreeSet<String>> =
        pages.iter().map(|page| (page.path.as_str(), anchors(page))).collect();
    let mut errors = Vec::new();
    for page in pages {
        for (line, text) in &page.prose {
            for target in targets(text) {
                if let Some(reason) = why_dead(&page.path, &target, tracked, &anchors) {
                    errors.push(format!("{}:{line}: dead link {target}: {reason}", page.path));
                }
            }
        }
    }
    errors
}

fn why_dead(
    page: &str,
    target: &str,
    tracked: &[String],
    anchors: &BTreeMap<&str, BTreeSet<String>>,
) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(it, to)| (it, Some(to)));
    let Some(path) = resolve(page, path) else {
        return Some("it leaves the repository".to_owned());
    };
    let directory = format!("{path}/");
    let is_there =
        path.is_empty() || tracked.iter().any(|it| *it == path || it.starts_with(&directory));
    if !is_there {
        return Some("no such tracked file or directory".to_owned());
    }
    let anchor = anchor?;
    let known = anchors.get(path.as_str()).is_some_and(|it| it.contains(anchor));
    (!known).then(|| format!("{path} has no heading for #{anchor}"))
}

/// Returns the target of a link on `page`, relative to the root of the repository; `None` if it is
/// outside.
fn resolve(page: &str, path: &str) -> Option<String> {
    if path.is_empty() {
        return Some(page.to_owned());
    }
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    if path.starts_with('/') {
        parts.clear();
    }
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Returns the link targets in a line of prose: `[text](target)` and `[name]: target`.
fn targets(line: &str) -> Vec<String> {
    let (_, prose) = split_code(line);
    let mut found = Vec::new();
    for rest in prose.split("](").skip(1) {
        let (mut depth, mut target) = (0, String::new());
        for letter in rest.chars() {
            match letter {
                '(' => depth += 1,
                ')' if depth == 0 => break,
                ')' => depth -= 1,
                ' ' => break,
                _ => {}
            }
            target.push(letter);
        }
        found.push(target);
    }
    if let Some((_, target)) = prose.strip_prefix('[').and_then(|it| it.split_once("]: ")) {
        found.extend(target.split(' ').next().map(str::to_owned));
    }
    found
}

/// Returns the anchors of the headings of a page, as GitHub generates them.
fn anchors(page: &Page) -> BTreeSet<String> {
    let mut times = BTreeMap::new();
    let mut found = BTreeSet::new();
    for (_, line) in &page.prose {
        let text = line.trim_start_matches('#');
        let is_heading = (1..=6).contains(&(line.len() - text.len())) && text.starts_with(' ');
        if !is_heading {
            continue;
        }
        let name = anchor(text.trim());
        let seen = times.entry(name.clone()).or_insert(0);
        found.insert(if *seen == 0 { name } else { format!("{name}-{seen}") });
        *seen += 1;
    }
    found
}

/// Returns the letters, digits, `-` and `_` of a heading in lower case, with `-` for each space. Links
/// are replaced by their text.
fn anchor(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        text += before;
        rest = after.split_once(')').map_or("", |(_, it)| it);
    }
    text += rest;
    let letters = text.chars().flat_map(char::to_lowercase).filter_map(|it| match it {
        ' ' => Some('-'),
        '-' | '_' => Some(it),
        _ => it.is_alphanumeric().then_some(it),
    });
    letters.collect()
}

#[test]
fn anchors_are_those_of_github() {
    let page = Page::new(
        "a.md",
        "# steadfast etcd, `steadfast why`\n## `[sync]`\n## In [short](b.md)\n## In short\n\
         ```sh\n# no heading\n```\n### 1. The image: über_all\n#none\n",
    );
    let expected =
        ["1-the-image-über_all", "in-short", "in-short-1", "steadfast-etcd-steadfast-why"];
    let found = anchors(&page);
    assert!(expected.iter().all(|it| found.contains(*it)), "{found:?}");
    assert!(found.contains("sync"), "{found:?}");
    assert_eq!(found.len(), 5, "{found:?}");
}

#[test]
fn each_dead_link_is_found() {
    let tracked = ["README.md", "docs/a.md", "docs/adr/b.md"].map(str::to_owned);
    let page = Page::new(
        "docs/a.md",
        "# Here\n[1](../README.md) [2](adr) [3](#here) [4](adr/b.md#there) [5](/docs/a.md)\n\
         [6](b.md) [7](#unknown) [8](adr/b.md#unknown) [9](../../x) `[10](none.md)` https://x.org/](y)\n\
         [11](https://example.org/a)\n[12]: none.md\n```sh\n[13](none.md)\n```\n",
    );
    let other = Page::new("docs/adr/b.md", "## There\n");
    let errors = dead(&[page, other], &tracked);
    let expected = ["b.md", "#unknown", "adr/b.md#unknown", "../../x", "y", "none.md"];
    assert_eq!(errors.len(), expected.len(), "{errors:#?}");
    for (error, target) in errors.iter().zip(expected) {
        assert!(error.contains(&format!("dead link {target}: ")), "{error}");
    }
}

//! Checks that the documentation matches the repository: no merge conflict markers, no dead links, no
//! commands that are unknown to the programs or the Makefile, a row for each key of etcd and of a job file.
//! `make verify` runs this.

mod commands;
mod job_file;
mod keys;
mod links;
mod merge;
mod pages;
mod programs;

use crate::pages::{Page, read, tracked};
use crate::programs::{Known, Makefile};

/// Pages without command checks. Release notes may mention removed commands.
const WITHOUT_COMMANDS: &[&str] = &["CHANGELOG.md"];

#[test]
fn no_tracked_file_has_merge_conflict_markers() {
    let mut errors = Vec::new();
    for path in tracked() {
        let Some(text) = read(&path) else { continue };
        errors.extend(merge::marks(&text).map(|line| format!("{path}:{line}: unfinished merge")));
    }
    report(&errors);
}

#[test]
fn links_between_pages_resolve() {
    let tracked = tracked();
    let pages = markdown(&tracked);
    report(&links::dead(&pages, &tracked));
}

#[test]
fn commands_on_pages_exist_in_help() {
    let mut pages = markdown(&tracked());
    pages.retain(|page| !WITHOUT_COMMANDS.contains(&page.path.as_str()));
    let known = Known { programs: programs::ours(), makefile: Makefile::ours() };
    let errors: Vec<String> = pages.iter().flat_map(|it| commands::unknown(it, &known)).collect();
    report(&errors);
}

#[test]
fn each_key_is_documented_and_its_record_fuzzed() {
    let text = |path: &str| read(path).expect("it is text");
    report(&keys::undocumented(&text("docs/protocol.md")));
    report(&keys::not_fuzzed(&text("fuzz/targets/records.rs")));
}

#[test]
fn each_key_of_a_job_file_has_a_row() {
    report(&job_file::differences(&read("docs/job-file.md").expect("it is text")));
}

fn markdown(tracked: &[String]) -> Vec<Page> {
    let paths = tracked.iter().filter(|path| path.ends_with(".md"));
    paths.map(|path| Page::new(path, &read(path).expect("a page is text"))).collect()
}

fn report(errors: &[String]) {
    assert!(errors.is_empty(), "\n{}", errors.join("\n"));
}

//! Tracked files, and Markdown pages split into prose and code.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the paths of all existing tracked files, relative to the root.
pub fn tracked() -> Vec<String> {
    let output = Command::new("git")
        // The tests may run as another user than the owner of the clone.
        .args(["-c", "safe.directory=*", "ls-files", "-z"])
        .current_dir(root())
        .output()
        .expect("git is installed");
    assert!(output.status.success(), "git lists no files: this is not a clone of the repository");
    let text = String::from_utf8(output.stdout).expect("paths are UTF-8");
    let paths = text.split('\0').filter(|path| root().join(path).is_file());
    paths.map(str::to_owned).collect()
}

/// Returns the text of a tracked file; `None` if it is not text.
pub fn read(path: &str) -> Option<String> {
    let bytes = fs::read(root().join(path)).expect("a tracked file is readable");
    String::from_utf8(bytes).ok()
}

/// A Markdown page.
pub struct Page {
    /// Path relative to the root of the repository.
    pub path: String,
    /// Lines outside of fenced blocks, with their numbers starting at 1.
    pub prose: Vec<(usize, String)>,
    pub blocks: Vec<Block>,
}

/// A fenced code block.
pub struct Block {
    /// The number of its first line.
    pub line: usize,
    pub language: String,
    pub text: String,
}

impl Page {
    pub fn new(path: &str, text: &str) -> Self {
        let mut page = Self { path: path.to_owned(), prose: Vec::new(), blocks: Vec::new() };
        let mut is_open = false;
        for (line, content) in (1..).zip(text.lines()) {
            match (content.trim_start().strip_prefix("```"), page.blocks.last_mut()) {
                (Some(_), _) if is_open => is_open = false,
                (Some(info), _) => {
                    let language = info.split_whitespace().next().unwrap_or_default().to_owned();
                    page.blocks.push(Block { line: line + 1, language, text: String::new() });
                    is_open = true;
                }
                (None, Some(block)) if is_open => block.text += &format!("{content}\n"),
                (None, _) => page.prose.push((line, content.to_owned())),
            }
        }
        page
    }
}

/// Splits a line of prose into the texts in backticks and the rest.
pub fn split_code(line: &str) -> (Vec<String>, String) {
    let (mut code, mut prose) = (Vec::new(), String::new());
    let mut rest = line;
    while let Some(start) = rest.find('`') {
        let opening = &rest[start..];
        let length = opening.len() - opening.trim_start_matches('`').len();
        let fence = &opening[..length];
        let body = &opening[length..];
        let Some(end) = body.find(fence) else { break };
        prose += &rest[..start];
        // In tables, bars within code are escaped.
        code.push(body[..end].trim().replace("\\|", "|"));
        rest = &body[end + length..];
    }
    prose += rest;
    (code, prose)
}

#[test]
fn a_page_is_split_into_prose_and_code() {
    let page = Page::new("a.md", "# A\n\n```sh\nls\n```\n\n  ```\n  x\n  ```\nend\n");
    let prose: Vec<_> = page.prose.iter().map(|(line, text)| (*line, text.as_str())).collect();
    assert_eq!(prose, [(1, "# A"), (2, ""), (6, ""), (10, "end")]);
    let blocks: Vec<_> =
        page.blocks.iter().map(|it| (it.line, it.language.as_str(), it.text.as_str())).collect();
    assert_eq!(blocks, [(4, "sh", "ls\n"), (8, "", "  x\n")]);
    let (code, prose) = split_code("| `a\\|b` and ``c ` d`` | one ` more |");
    assert_eq!(code, ["a|b", "c ` d"]);
    assert_eq!(prose, "|  and  | one ` more |");
}

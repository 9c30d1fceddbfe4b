//! Finds merge conflict markers.

/// Returns the line numbers of conflict markers, starting at 1.
pub fn marks(text: &str) -> impl Iterator<Item = usize> {
    text.lines().enumerate().filter(|(_, line)| is_mark(line)).map(|(index, _)| index + 1)
}

fn is_mark(line: &str) -> bool {
    let first = line.split(' ').next().unwrap_or_default();
    match first.as_bytes() {
        [sign @ (b'<' | b'>' | b'|'), rest @ ..] => {
            rest.len() == 6 && rest.iter().all(|it| it == sign)
        }
        _ => line.len() == 7 && line.bytes().all(|it| it == b'='),
    }
}

#[test]
fn each_merge_conflict_marker_is_found() {
    let mark = |sign: &str| sign.repeat(7);
    let text = format!(
        "{} HEAD\nours\n{} base\n{}\ntheirs\n{} branch\n",
        mark("<"),
        mark("|"),
        mark("="),
        mark(">")
    );
    assert_eq!(marks(&text).collect::<Vec<_>>(), [1, 3, 4, 6]);
    assert_eq!(marks("a << b\n========\n| a | b |\n>> c\n").count(), 0);
}

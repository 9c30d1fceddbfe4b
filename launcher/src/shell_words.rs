//! Command lines as a POSIX shell reads them: split into words, and words quoted.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Splits a command line at spaces. Quotes and backslashes have their meaning; nothing is expanded.
///
/// # Errors
/// A message, if a quote is open or there is no word.
pub(crate) fn split(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    // `None` between words: `''` is a word.
    let (mut word, mut quote): (Option<String>, _) = (None, None);
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (None | Some('"'), '\\') => {
                let next = letters.next().ok_or("it ends with a backslash")?;
                let is_kept = quote.is_some() && !matches!(next, '"' | '\\' | '$' | '`');
                let word = word.get_or_insert_default();
                word.extend(is_kept.then_some('\\'));
                word.push(next);
            }
            (Some(_), _) => word.get_or_insert_default().push(letter),
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, _) if letter.is_whitespace() => words.extend(word.take()),
            (None, _) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    match quote {
        Some(open) => Err(format!("the quote {open} is not closed")),
        None if words.is_empty() => Err("it is empty".to_owned()),
        None => Ok(words),
    }
}

/// Joins words into a command line that a POSIX shell splits into the same words.
pub(crate) fn join<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> OsString {
    let mut line = Vec::new();
    for word in words {
        if !line.is_empty() {
            line.push(b' ');
        }
        line.extend(quoted(word.as_bytes()));
    }
    OsString::from_vec(line)
}

fn quoted(word: &[u8]) -> Vec<u8> {
    let is_plain = |it: &u8| it.is_ascii_alphanumeric() || b"-_./:,@%+".contains(it);
    if !word.is_empty() && word.iter().all(is_plain) {
        return word.to_vec();
    }
    let parts: Vec<&[u8]> = word.split(|it| *it == b'\'').collect();
    [b"'", parts.join(&br"'\''"[..]).as_slice(), b"'"].concat()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_command_line_is_split_as_by_a_shell() {
        let words = |text| split(text).unwrap();
        assert_eq!(words("ssh  -p 22 "), ["ssh", "-p", "22"]);
        assert_eq!(words(r#"a 'b c' "d \" \e" '' f\ g"#), ["a", "b c", r#"d " \e"#, "", "f g"]);
        for text in ["", " ", "'a", "\"a", "a\\"] {
            assert!(split(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_shell_reads_joined_words_as_they_were() {
        let words = ["printf", "%s|", "a b", "it's", "", "$HOME", "~", "*", "`ls`", "a\nb", "\"\\"];
        let line = join(words.iter().map(OsStr::new));
        let output = Command::new("sh").arg("-c").arg(&line).output().unwrap();
        let expected = words[2..].iter().map(|it| format!("{it}|")).collect::<String>();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
        assert_eq!(split(line.to_str().unwrap()).unwrap(), words);
    }
}

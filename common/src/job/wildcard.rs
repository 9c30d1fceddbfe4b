//! Names with wildcards: columns of a dataset, parameters of a model.

use glob::Pattern;

/// Returns the matcher of a name in which `*` stands for any run of characters, and no other character is special.
pub fn wildcard(name: &str) -> Pattern {
    let parts: Vec<String> = name.split('*').map(Pattern::escape).collect();
    let mut glob = parts.join("*");
    // Two in a row would have a meaning of their own.
    while glob.contains("**") {
        glob = glob.replace("**", "*");
    }
    Pattern::new(&glob).expect("all other special characters are escaped")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_star_is_special() {
        let matches = |pattern, name| wildcard(pattern).matches(name);
        assert!(matches("*.bias", "layers.0.bias") && matches("a***b", "ab"));
        assert!(
            matches("a[0]?", "a[0]?") && !matches("a[0]?", "a0x") && !matches("bias", "a.bias")
        );
    }
}

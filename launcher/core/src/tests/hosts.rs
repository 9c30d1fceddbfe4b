//! Lists of hosts.

use proptest::prelude::*;
use steadfast_common::records::rendezvous::SLOTS_MAX;

use super::hosts as expected;
use crate::hosts::{
    HOSTS_MAX, Host, HostName, HostsError, LINE_BYTES_MAX, OUTPUT_BYTES_MAX, parse_list,
    parse_output,
};
use crate::source::{Source, SourceError};

const DEFAULT: u32 = 3;

fn output(text: &str) -> Result<Vec<Host>, String> {
    parse_output(text.as_bytes(), DEFAULT).map_err(|error| error.to_string())
}

fn one(text: &str) -> (String, u32) {
    let hosts = output(text).unwrap();
    assert_eq!(hosts.len(), 1, "{text}");
    (hosts[0].name.to_string(), hosts[0].slots)
}

/// S001-1: a script prints `host:slots` or `host`; the order is that of the lines.
#[test]
fn a_line_is_a_host_with_or_without_slots() {
    assert_eq!(output("b:2\na\n10.68.32.2:4\n"), Ok(expected("b:2 a:3 10.68.32.2:4")));
}

/// S001-1: `--hosts` has the same syntax, with commas.
#[test]
fn a_list_has_commas_between_its_hosts() {
    let hosts = parse_list(" b:2, a ,c_1.example:1", DEFAULT);
    assert_eq!(hosts, Ok(expected("b:2 a:3 c_1.example:1")));
    let error = parse_list("a:1,#b:2", DEFAULT).unwrap_err();
    assert!(error.to_string().starts_with("entry 2 of the hosts: `#b` is not a host"), "{error}");
}

/// S001-4: no output is a list without hosts, and not a host without a name.
#[test]
fn an_empty_output_has_no_hosts() {
    for text in ["", "\n", "\r\n\r\n", "  \n\t\n", "# none today\n", "#\n # \n"] {
        assert_eq!(output(text), Ok(Vec::new()), "{text:?}");
    }
}

/// S001-7
#[test]
fn carriage_returns_blank_lines_and_comments_do_not_matter() {
    let text = "# hosts: a\r\na:1\r\n\r\n  b:2  # the slow one: 7\r\n#c:3\r\nd:4";
    assert_eq!(output(text), Ok(expected("a:1 b:2 d:4")));
    assert_eq!(parse_output(b"a:1 # \xff\n", DEFAULT), Ok(expected("a:1")));
}

/// S001-7: an IPv6 address has one form, so that it is the same host however it is written.
#[test]
fn an_ipv6_address_is_in_brackets_if_slots_follow() {
    for (text, slots) in [
        ("[fd00::1]:4", 4),
        ("[fd00::1]", DEFAULT),
        ("fd00::1", DEFAULT),
        ("FD00:0::1", DEFAULT),
        ("[fd00:0:0:0:0:0:0:1]:4", 4),
    ] {
        assert_eq!(one(text), ("fd00::1".to_owned(), slots), "{text}");
    }
    assert_eq!(one("::1").0, "::1");
    assert_eq!(one("fd00::1:ab").0, "fd00::1:ab");
    let host = &output("[fd00::1]:4").unwrap()[0];
    assert_eq!(host.to_string(), "[fd00::1]:4");
}

/// S001-7: `fd00::1:4` is an address, and also the address `fd00::1` with 4 slots.
#[test]
fn an_ambiguous_ipv6_address_is_refused() {
    let message =
        "line 2 of the hosts: `fd00::1:4` may end in slots or not; write the address in brackets";
    assert_eq!(output("a\nfd00::1:4"), Err(message.to_owned()));
}

/// S001-7: a line printed twice is one host; the seed's script has a set of lines.
#[test]
fn a_repeated_host_counts_once_and_a_contradiction_is_refused() {
    assert_eq!(output("a:2\nb\na:2\nb:3\n"), Ok(expected("a:2 b:3")));
    let message = "line 3 of the hosts: host a has 4 slots here and 2 before";
    assert_eq!(output("a:2\nb\na:4\n"), Err(message.to_owned()));
    assert!(output("fd00::1\n[FD00::1]:4\n").is_err());
}

/// S001-7: garbage is refused with its line.
#[test]
fn garbage_is_refused_with_the_number_of_its_line() {
    for text in [
        "a:0",
        "a:",
        "a:x",
        "a:-1",
        "a:+1",
        "a: 1",
        "a:1.5",
        "a:4097",
        "a:99999999999",
        ":4",
        "a b",
        "a slots=4",
        "a,b",
        "user@a",
        "a/b",
        "-oProxyCommand=x",
        ".a",
        "ü",
        "a\u{0}",
        "a:1:2",
        "[a]:1",
        "[fd00::1",
        "[fd00::1]4",
        "[fd00::1]:",
        "[fd00::1]:0",
        "[]",
        "fe80::1%eth0",
        "fd00:::1",
        "::1]:4",
    ] {
        let error = output(&format!("ok\n\n{text}\n")).unwrap_err();
        assert!(error.starts_with("line 3 of the hosts: "), "{text}: {error}");
    }
    assert!(matches!(parse_output(b"\xff", 1), Err(HostsError::Line { number: 1, .. })));
    assert!(parse_output(b"a", 0).is_err());
}

/// S001-7: what a message quotes is short, and does not control the terminal.
#[test]
fn a_message_quotes_little_of_the_garbage() {
    let error = output(&format!("\u{1b}[2J{}", "x".repeat(900))).unwrap_err();
    assert!(error.len() < 200 && !error.contains('\u{1b}'), "{error}");
}

/// S001-7
#[test]
fn a_list_of_hosts_has_bounds() {
    let lines = |count: usize| Vec::from_iter((0..count).map(|it| format!("h{it}"))).join("\n");
    assert_eq!(output(&lines(HOSTS_MAX)).unwrap().len(), HOSTS_MAX);
    let error = output(&lines(HOSTS_MAX + 1)).unwrap_err();
    assert_eq!(error, "line 2049 of the hosts: there are more than 2048 hosts");
    assert!(output(&format!("h:{SLOTS_MAX}")).is_ok());
    assert!(output(&format!("{}a", " ".repeat(LINE_BYTES_MAX))).unwrap_err().contains("longer"));
    assert!(output(&"a".repeat(254)).is_err());
    assert!(output(&" ".repeat(OUTPUT_BYTES_MAX + 1)).unwrap_err().contains("longer"));
}

/// S001-5
#[test]
fn a_fixed_list_has_two_hosts() {
    for hosts in ["", "a:4", "a:4,a:4", ","] {
        let error = Source::of(Some(hosts), None, DEFAULT).unwrap_err();
        let message = "Cannot run in fault tolerance mode with fewer than 2 hosts.";
        assert_eq!(error.to_string(), message);
    }
    let source = Source::of(Some("a:2,b:2"), None, DEFAULT);
    assert_eq!(source, Ok(Source::Fixed(expected("a:2 b:2"))));
}

/// S001-5
#[test]
fn the_hosts_have_one_source() {
    let error = Source::of(None, None, DEFAULT).unwrap_err().to_string();
    let message = "One of --host-discovery-script, --hosts, or --hostnames must be provided";
    assert_eq!(error, message);
    assert_eq!(Source::of(Some("a,b"), Some("s"), DEFAULT), Err(SourceError::Both));
    assert_eq!(Source::of(None, Some("s"), DEFAULT), Ok(Source::Script("s".to_owned())));
}

/// A name from a key or a record in etcd is checked like any other.
#[test]
fn a_host_name_is_a_part_of_a_key() {
    assert_eq!(serde_json::from_str::<HostName>("\"FD00::1\"").unwrap().as_str(), "fd00::1");
    for text in ["", "a/b", "-a", "a b", "..", "a:1"] {
        assert!(text.parse::<HostName>().is_err(), "{text}");
    }
}

proptest! {
    /// S001-7: no bytes make the parser panic, and what it accepts is bounded and survives a round trip.
    #[test]
    fn any_output_is_a_bounded_list_or_is_refused(
        bytes in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..300),
            "([ab.:\\[\\]0-9#,\r-]{0,12}\n?){0,8}".prop_map(String::into_bytes),
            "(\\[?(fd00|1|:|::){0,9}\\]?(:[0-9]{0,5})?\n){0,3}".prop_map(String::into_bytes),
        ],
        default_slots in 0u32..5,
    ) {
        if let Ok(hosts) = parse_output(&bytes, default_slots) {
            prop_assert!(hosts.len() <= bytes.len());
            prop_assert!(hosts.iter().all(|it| 1 <= it.slots && it.slots <= SLOTS_MAX));
            let text: Vec<String> = hosts.iter().map(Host::to_string).collect();
            prop_assert_eq!(parse_output(text.join("\n").as_bytes(), 1), Ok(hosts.clone()));
            prop_assert_eq!(parse_list(&text.join(","), 1), Ok(hosts));
        }
        if let Ok(text) = std::str::from_utf8(&bytes) {
            let _ = parse_list(text, default_slots);
        }
    }
}

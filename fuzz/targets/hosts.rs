//! Lists of hosts: a valid one can be written and read again, and discovery follows the lists.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use steadfast_common::ids::Millis;
use steadfast_common::records::rendezvous::SLOTS_MAX;
use steadfast_fuzz::{seeds, within};
use steadfast_launcher_core::discovery::{Discovery, Update};
use steadfast_launcher_core::hosts::{HOSTS_MAX, Host, HostName, parse_list, parse_output};
use steadfast_launcher_core::source::{Source, SourceError};

/// A host of two bytes, with its comma, has a name in several maps.
const TIMES_MAX: usize = 512;

fuzz_target!(init: seeds("hosts", well_formed()), |data: &[u8]| {
    let Some((default_slots, outputs)) = data.split_first() else { return };
    let default_slots = u32::from(*default_slots);
    within(TIMES_MAX * outputs.len() + (64 << 10), || {
        // A byte that no list contains separates the outputs of one poll after the other.
        follow(outputs.split(|it| *it == 0), default_slots);
    });
});

fn follow<'a>(outputs: impl Iterator<Item = &'a [u8]>, default_slots: u32) {
    let mut discovery = Discovery::new(1000);
    for (output, time) in outputs.zip(0..) {
        let before = discovery.hosts().map(<[Host]>::to_vec);
        match parse_output(output, default_slots) {
            Ok(hosts) => {
                check(&hosts, default_slots);
                let update = discovery.succeeded(Millis(time), &hosts);
                follows(&before.unwrap_or_default(), &hosts, &discovery, update);
            }
            Err(error) => {
                drop(discovery.failed(Millis(time), &error.to_string()).to_string());
                assert_eq!(discovery.hosts().map(<[Host]>::to_vec), before);
            }
        }
        if let Ok(list) = std::str::from_utf8(output) {
            check_list(list, default_slots);
        }
    }
}

/// Checks a list that was accepted.
fn check(hosts: &[Host], default_slots: u32) {
    assert!(hosts.len() <= HOSTS_MAX);
    assert!(hosts.iter().all(|host| (1..=SLOTS_MAX).contains(&host.slots)));
    assert_eq!(slots(hosts).len(), hosts.len(), "each host is listed once");
    let texts: Vec<String> = hosts.iter().map(Host::to_string).collect();
    assert_eq!(parse_output(texts.join("\n").as_bytes(), default_slots).as_deref(), Ok(hosts));
    assert_eq!(parse_list(&texts.join(","), default_slots).as_deref(), Ok(hosts));
    for host in hosts {
        assert_eq!(host.name.as_str().parse::<HostName>().as_ref(), Ok(&host.name));
        assert!(!host.name.as_str().contains('/') && !host.name.as_str().starts_with('-'));
    }
}

fn check_list(list: &str, default_slots: u32) {
    let source = Source::of(Some(list), None, default_slots);
    match parse_list(list, default_slots) {
        Ok(hosts) => {
            check(&hosts, default_slots);
            let is_fixed = 2 <= hosts.len();
            let expected =
                if is_fixed { Ok(Source::Fixed(hosts)) } else { Err(SourceError::TooFewHosts) };
            assert_eq!(source, expected);
        }
        Err(error) => assert_eq!(source, Err(SourceError::Hosts(error))),
    }
}

/// Checks that known hosts keep their order, new ones follow, and the update says what differs.
fn follows(before: &[Host], found: &[Host], discovery: &Discovery, update: Update) {
    let after = discovery.hosts().expect("a poll succeeded");
    assert_eq!(slots(after), slots(found));
    assert_eq!(update == Update::NoUpdate, slots(before) == slots(found));
    let known = |host: &Host| before.iter().position(|it| it.name == host.name);
    let places: Vec<usize> = after.iter().map(|it| known(it).unwrap_or(usize::MAX)).collect();
    assert!(places.is_sorted());
}

fn slots(hosts: &[Host]) -> BTreeMap<&HostName, u32> {
    hosts.iter().map(|host| (&host.name, host.slots)).collect()
}

fn well_formed() -> Vec<Vec<u8>> {
    [
        &b"\x02a:4\nb\r\n\n# none\n10.0.0.1:1 # first\n"[..],
        b"\x01[fd00::1]:4\nfd00::2\n[fd00::3]\0fd00::2\nnew:4",
        b"\x01a,b:2,[::1]:3,,a:1",
        b"\x03a\nb\0\0a:4\nb\0b\n\xff\0a:3\nb:3\nc",
    ]
    .map(<[u8]>::to_vec)
    .to_vec()
}

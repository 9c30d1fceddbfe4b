//! Certificates as they come from the network: only a name makes a role.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rcgen::{CertificateParams, KeyPair, SanType};
use steadfast_fuzz::{seeds, within};
use steadfast_host::role::Role;
use steadfast_host::tls::described;

fuzz_target!(init: seeds("certificates", well_formed()), |der: &[u8]| {
    let Ok(found) = within(64 * der.len() + (64 << 10), || described(der)) else { return };
    for role in Role::ALL {
        let is_there = der.windows(role.dns_name().len()).any(|it| it == role.dns_name().as_bytes());
        assert!(is_there || !found.roles.contains(&role), "{role} is nowhere in it");
    }
    assert!(found.names.iter().map(String::len).sum::<usize>() <= 64 * der.len());
});

fn well_formed() -> Vec<Vec<u8>> {
    let of = |names: Vec<String>| {
        let mut params = CertificateParams::new(names).expect("they are names");
        params.subject_alt_names.push(SanType::IpAddress([10, 0, 0, 1].into()));
        let key = KeyPair::generate().expect("there is chance");
        params.self_signed(&key).expect("a key signs").der().to_vec()
    };
    Role::ALL.map(|role| of(vec![role.dns_name().to_owned(), "h".to_owned()])).to_vec()
}

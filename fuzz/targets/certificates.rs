//! Certificates from the network: a role requires its DNS name in the certificate.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rcgen::{CertificateParams, KeyPair, SanType};
use steadfast_common::role::Role;
use steadfast_fuzz::{seeds, within};
use steadfast_net::tls::described;

fuzz_target!(init: seeds("certificates", well_formed()), |der: &[u8]| {
    let Ok(found) = within(64 * der.len() + (64 << 10), || described(der)) else { return };
    for role in Role::ALL {
        let is_there = der.windows(role.dns_name().len()).any(|it| it == role.dns_name().as_bytes());
        assert!(is_there || !found.roles.contains(&role), "the certificate does not contain {role}");
    }
    assert!(found.names.iter().map(String::len).sum::<usize>() <= 64 * der.len());
});

fn well_formed() -> Vec<Vec<u8>> {
    let of = |names: Vec<String>| {
        let mut params = CertificateParams::new(names).expect("the names are valid");
        params.subject_alt_names.push(SanType::IpAddress([10, 0, 0, 1].into()));
        let key = KeyPair::generate().expect("a key can be generated");
        params.self_signed(&key).expect("the key signs").der().to_vec()
    };
    Role::ALL.map(|role| of(vec![role.dns_name().to_owned(), "h".to_owned()])).to_vec()
}

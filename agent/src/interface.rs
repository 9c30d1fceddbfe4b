//! The address of a network interface: where other nodes reach this one, if it has several.

use std::net::IpAddr;

use if_addrs::{Interface, get_if_addrs};
use steadfast_process::Failure;

/// The variables by which the libraries of collective operations choose an interface.
pub(crate) const VARIABLES: [&str; 2] = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];

/// Returns the address of an interface by its name.
///
/// # Errors
/// If there is no such interface, or it has no address.
pub(crate) fn address_of(name: &str) -> Result<IpAddr, Failure> {
    let all = get_if_addrs()
        .map_err(|error| Failure::io("cannot list the network interfaces", &error))?;
    choose(name, &all)
}

fn choose(name: &str, all: &[Interface]) -> Result<IpAddr, Failure> {
    // Others do not reach the address of a link without the name of their own interface.
    let of_name = all.iter().filter(|it| it.name == name && !it.is_link_local());
    let mut addresses: Vec<IpAddr> = of_name.map(Interface::ip).collect();
    addresses.sort();
    addresses.first().copied().ok_or_else(|| {
        let mut names: Vec<&str> = all.iter().map(|it| it.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        Failure::invalid(format!(
            "--nic {name}: there is no interface of this name with an address; there are {}",
            names.join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_chosen_by_its_name() {
        assert_eq!(address_of("lo").unwrap().to_string(), "127.0.0.1");
        let error = address_of("no-such").unwrap_err().to_string();
        assert!(error.starts_with("--nic no-such: there is no interface"), "{error}");
        assert!(error.contains("lo"), "{error}");
    }
}

//! Settings that all processes share.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use steadfast_common::job::durations;
use steadfast_common::records::keys::Keys;
use steadfast_coord::{CoordError, Etcd, EtcdOptions};
use steadfast_net::tls::{CA_FILE, CERTIFICATE_FILE, KEY_FILE};
use tracing::warn;

use crate::security::{SecurityArgs, TlsArgs};
use crate::{Failure, Readiness, Shutdown, is_on_this_host};

/// An address that no host has: the route to it is the default route.
const ELSEWHERE: &str = "http://192.0.2.1:1";

/// Settings of every server process; flattened into its arguments.
#[derive(Clone, Debug, Args)]
pub struct CommonArgs {
    #[command(flatten)]
    pub etcd: EtcdArgs,
    /// Name of the job.
    #[arg(long, value_name = "NAME", value_parser = job_name)]
    pub job: String,
    /// Prefix of the job's keys in etcd [default: /jobs/<job>]; `/` for keys without a prefix.
    #[arg(long, value_name = "KEY", value_parser = keys_root)]
    pub root: Option<String>,
    /// Address to serve on; port 0 picks a free port.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0", value_parser = socket_addr)]
    pub listen: SocketAddr,
    /// Host, or host and port, at which other processes connect to this one [default: the bound address;
    /// if that is 0.0.0.0, the address of this machine on the route to etcd].
    #[arg(long, value_name = "HOST[:PORT]", value_parser = advertised_host)]
    pub advertise: Option<String>,
    /// Address of the admin port: health, metrics, status.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0", value_parser = socket_addr)]
    pub admin_listen: SocketAddr,
    /// Time to live of this process's lease in etcd: how long after its last keep-alive it counts as
    /// alive.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = lease_ttl)]
    pub lease_ttl: Duration,
    /// Wait for etcd for so long when the process starts.
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = durations::parse)]
    pub etcd_start_timeout: Duration,
    #[command(flatten)]
    pub security: SecurityArgs,
    /// When the job completes, wait for a drain request instead of exiting with 0; for supervisors that
    /// restart on every exit code.
    #[arg(long)]
    pub wait_after_completion: bool,
    #[command(flatten)]
    pub log: LogArgs,
    /// File with settings (TOML); flags and environment variables override it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the settings, print them and exit.
    #[arg(long)]
    pub check_config: bool,
}

/// Connection settings of etcd.
#[derive(Clone, Debug, Args)]
pub struct EtcdArgs {
    /// Addresses of the etcd members, separated by commas: URLs, or `host:port`.
    #[arg(
        long,
        value_name = "URL,…",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:2379",
        value_parser = endpoint
    )]
    pub etcd_endpoints: Vec<String>,
    #[command(flatten)]
    pub auth: EtcdAuthArgs,
}

/// Authentication settings of etcd.
#[derive(Clone, Debug, Default, Args)]
pub struct EtcdAuthArgs {
    /// User name for etcd.
    #[arg(long, value_name = "NAME", requires = "etcd_password_file")]
    pub etcd_user: Option<String>,
    /// File with the password of that user.
    #[arg(long, value_name = "FILE", requires = "etcd_user")]
    pub etcd_password_file: Option<PathBuf>,
    /// PEM file with the certificate authority of etcd.
    #[arg(long, value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,
    /// PEM file with the client certificate for etcd.
    #[arg(long, value_name = "FILE", requires = "etcd_key")]
    pub etcd_cert: Option<PathBuf>,
    /// PEM file with the key of that certificate.
    #[arg(long, value_name = "FILE", requires = "etcd_cert")]
    pub etcd_key: Option<PathBuf>,
}

/// Settings of logs and traces.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Which events to log: a level, or `target=level` pairs separated by commas.
    #[arg(long = "log", value_name = "FILTER", default_value = "info", value_parser = log_filter)]
    pub filter: String,
    /// Format of log lines.
    #[arg(long = "log-format", value_name = "FORMAT", default_value = "text")]
    pub format: LogFormat,
    /// Send traces to this OpenTelemetry collector (gRPC), such as http://127.0.0.1:4317.
    #[arg(long, value_name = "URL", value_parser = collector)]
    pub otlp_endpoint: Option<String>,
}

/// Formats of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    /// One JSON object a line.
    Json,
}

impl CommonArgs {
    /// Returns the keys of the job: those below `root` if it is set, or else those of the job's name.
    pub fn keys(&self) -> Keys {
        self.root.as_deref().map_or_else(|| Keys::of_job(&self.job), Keys::below)
    }

    /// Returns the connection options for etcd. Logs a warning if this process has TLS, but etcd is on another machine
    /// without TLS.
    pub fn etcd_options(&self) -> EtcdOptions {
        let in_the_clear = |url: &&String| {
            let address = url.strip_prefix("http://");
            address.is_some_and(|it| !is_on_this_host(it) && !it.starts_with("localhost:"))
        };
        if self.security.tls.tls.is_some()
            && let Some(url) = self.etcd.urls().iter().find(in_the_clear)
        {
            warn!(url, "no TLS to etcd; an attacker on the network can change the job's state");
        }
        self.etcd.options(&self.security.tls)
    }

    /// Connects to etcd, which may start later than this process. Returns `None` if the process is to leave before.
    ///
    /// # Errors
    /// If etcd does not answer in time, or refuses the connection.
    pub async fn connect_to_etcd(
        &self,
        readiness: &Readiness,
        shutdown: &Shutdown,
    ) -> Result<Option<Etcd>, Failure> {
        let (options, limit) = (self.etcd_options(), self.etcd_start_timeout);
        let waits = |error: &CoordError| {
            warn!(%error, limit = ?limit, "waiting for etcd (--etcd-start-timeout)");
            readiness.set_not_ready(format!("waiting for etcd: {error}"));
        };
        tokio::select! {
            biased;
            connected = Etcd::connect_within(&options, limit, waits) => match connected {
                Ok(etcd) => Ok(Some(etcd)),
                Err(error) if error.is_transient() => Err(Failure::unavailable(format!(
                    "{error} This process has waited for {limit:?} (--etcd-start-timeout)"
                ))),
                Err(error) => Err(error.into()),
            },
            () = shutdown.drain() => Ok(None),
        }
    }

    /// Returns the address at which other processes connect to the gRPC port.
    ///
    /// # Errors
    /// If the bound address is unspecified (`0.0.0.0`), and no other address is known.
    pub fn advertised(&self, bound: SocketAddr) -> Result<String, Failure> {
        self.etcd.advertised(self.advertise.as_deref(), bound)
    }

    /// Returns the address of the admin port for other processes: the advertised host, the bound port.
    ///
    /// # Errors
    /// Returns the errors of [`CommonArgs::advertised`].
    pub fn admin_advertised(&self, bound: SocketAddr) -> Result<String, Failure> {
        match &self.advertise {
            None => self.etcd.own_address(bound),
            // A port bound to loopback is not reachable by an advertised host.
            Some(_) if bound.ip().is_loopback() => Ok(bound.to_string()),
            Some(address) => Ok(format!("{}:{}", host_of(address), bound.port())),
        }
    }
}

/// Returns the local address on the route to a URL. Sends no packet.
pub fn address_towards(url: &str) -> Option<IpAddr> {
    let address = url.split_once("://")?.1;
    let peer = address.to_socket_addrs().ok()?.next()?;
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(peer).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Returns the address of this machine on the default route, which other machines most likely reach.
///
/// # Errors
/// If there is none.
pub fn own_host() -> Result<String, Failure> {
    match address_towards(ELSEWHERE).filter(|address| !address.is_loopback()) {
        Some(IpAddr::V6(address)) => Ok(format!("[{address}]")),
        Some(IpAddr::V4(address)) => Ok(address.to_string()),
        None => {
            let message = "the hosts need an address of this machine; set it with --advertise";
            Err(Failure::invalid(message))
        }
    }
}

impl EtcdArgs {
    /// Returns the address at which other processes connect to a bound one, given `--advertise`.
    ///
    /// # Errors
    /// If the bound address is unspecified (`0.0.0.0`), and no other address is known.
    pub fn advertised(
        &self,
        advertise: Option<&str>,
        bound: SocketAddr,
    ) -> Result<String, Failure> {
        match advertise {
            None => self.own_address(bound),
            Some(address) if port_of(address).is_some_and(|port| port != 0) => {
                Ok(address.to_owned())
            }
            Some(address) => Ok(format!("{}:{}", host_of(address), bound.port())),
        }
    }

    /// Returns the bound address. If that is unspecified, returns the address of this machine on the
    /// route to etcd, which the other clients of etcd can most likely reach.
    fn own_address(&self, bound: SocketAddr) -> Result<String, Failure> {
        if !bound.ip().is_unspecified() {
            return Ok(bound.to_string());
        }
        let toward = self.urls().iter().find_map(|it| address_towards(it));
        // If etcd is on this machine, the route to it does not show which address others can reach.
        match toward.filter(|address| !address.is_loopback()) {
            Some(address) => Ok(SocketAddr::new(address, bound.port()).to_string()),
            None => Err(Failure::invalid(format!(
                "other processes cannot connect to {bound}; set the address with --advertise"
            ))),
        }
    }

    /// Returns the URLs of the etcd members, with a scheme even where the arguments have none.
    pub fn urls(&self) -> Vec<String> {
        self.etcd_endpoints.iter().map(|endpoint| self.auth.url(endpoint)).collect()
    }

    /// Returns the connection options for the members; see [`EtcdAuthArgs::options`].
    pub fn options(&self, own: &TlsArgs) -> EtcdOptions {
        self.auth.options(self.urls(), own)
    }
}

impl EtcdAuthArgs {
    /// Returns the URL of an endpoint. Without a scheme it is `https` if there are certificate flags for etcd,
    /// as for `etcdctl`.
    pub fn url(&self, endpoint: &str) -> String {
        match (endpoint.contains("://"), self.has_certificates()) {
            (true, _) => endpoint.to_owned(),
            (false, true) => format!("https://{endpoint}"),
            (false, false) => format!("http://{endpoint}"),
        }
    }

    fn has_certificates(&self) -> bool {
        self.etcd_ca.is_some() || self.etcd_cert.is_some()
    }

    /// Returns the connection options for other endpoints. Without certificate flags for etcd, `https`
    /// endpoints use this process's `own` credentials.
    pub fn options(&self, endpoints: Vec<String>, own: &TlsArgs) -> EtcdOptions {
        let own = own.tls.as_ref().filter(|_| !self.has_certificates());
        let own = own.filter(|_| endpoints.iter().any(|it| it.starts_with("https://")));
        let file = |given: &Option<PathBuf>, name: &str| {
            given.clone().or_else(|| own.map(|directory| directory.join(name)))
        };
        EtcdOptions {
            endpoints,
            user: self.etcd_user.clone(),
            password_file: self.etcd_password_file.clone(),
            ca_file: file(&self.etcd_ca, CA_FILE),
            cert_file: file(&self.etcd_cert, CERTIFICATE_FILE),
            key_file: file(&self.etcd_key, KEY_FILE),
        }
    }
}

/// Checks the name of a job.
///
/// # Errors
/// A message with the valid form.
pub fn job_name(text: &str) -> Result<String, String> {
    let allowed = |it: char| it.is_ascii_alphanumeric() || "-_.".contains(it);
    if text.is_empty() || 100 < text.len() || text.starts_with('.') || !text.chars().all(allowed) {
        return Err("use 1 to 100 letters, digits, `-`, `_` or `.`, no leading `.`".to_owned());
    }
    Ok(text.to_owned())
}

fn keys_root(text: &str) -> Result<String, String> {
    match text.strip_prefix('/') {
        Some("") => Ok("/".to_owned()),
        Some(rest) if !rest.ends_with('/') && !rest.contains("//") => Ok(text.to_owned()),
        _ => Err("use `/`, or a key such as `/jobs/digits` without a final `/`".to_owned()),
    }
}

fn socket_addr(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "use an IP address and a port, such as `127.0.0.1:0`".to_owned())
}

/// Parses the value of `--advertise`.
///
/// # Errors
/// If it is neither a host nor a host and a port.
pub fn advertised_host(text: &str) -> Result<String, String> {
    let name = host_of(text);
    let bad_port = text.len() != name.len() && port_of(text).is_none();
    let bare_v6 = name.contains(':') && !name.starts_with('[');
    if name.is_empty() || bad_port || bare_v6 || text.contains(|it: char| "/ @".contains(it)) {
        return Err("use `host`, `host:port` or `[v6-address]:port`".to_owned());
    }
    Ok(text.to_owned())
}

/// Returns the part of `host:port` before the port.
pub fn host_of(text: &str) -> &str {
    match text.rfind(':') {
        Some(colon) if !text[colon..].contains(']') => &text[..colon],
        _ => text,
    }
}

fn port_of(text: &str) -> Option<u16> {
    text[host_of(text).len()..].strip_prefix(':')?.parse().ok()
}

/// Checks the address of an etcd member: a URL, or `host:port`.
///
/// # Errors
/// A message with the valid form.
pub fn endpoint(text: &str) -> Result<String, String> {
    let rest = match text.split_once("://") {
        Some(("http" | "https", rest)) => Some(rest),
        Some(_) => None,
        None => port_of(text).map(|_| text),
    };
    match rest {
        Some(rest) if rest.contains('@') => {
            Err("a URL must not contain a user name; use --etcd-user and --etcd-password-file"
                .to_owned())
        }
        Some(rest) if !rest.is_empty() && !rest.contains(char::is_whitespace) => {
            Ok(text.trim_end_matches('/').to_owned())
        }
        _ => Err("use `host:port`, or a URL such as `http://127.0.0.1:2379`".to_owned()),
    }
}

/// Checks the URL of an OpenTelemetry collector.
fn collector(text: &str) -> Result<String, String> {
    match text.parse::<http::Uri>() {
        Ok(url) if matches!(url.scheme_str(), Some("http" | "https")) && url.host().is_some() => {
            Ok(text.to_owned())
        }
        _ => Err("use a URL such as `http://127.0.0.1:4317`".to_owned()),
    }
}

/// Parses the time to live of a lease, 1 s to 10 min.
///
/// # Errors
/// A message with the valid range.
pub fn lease_ttl(text: &str) -> Result<Duration, String> {
    let ttl = durations::parse(text)?;
    if ttl < Duration::from_secs(1) || Duration::from_secs(600) < ttl {
        return Err("use 1s to 10m".to_owned());
    }
    Ok(ttl)
}

fn log_filter(text: &str) -> Result<String, String> {
    text.parse::<tracing_subscriber::filter::Targets>()
        .map(|_| text.to_owned())
        .map_err(|error| format!("use a level or `target=level`: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        common: CommonArgs,
    }

    fn common(more: &[&str]) -> CommonArgs {
        Only::parse_from(["it", "--job", "digits"].iter().chain(more)).common
    }

    #[test]
    fn keys_lie_below_the_job_unless_a_root_is_given() {
        assert_eq!(common(&[]).keys().ps_desired(), "/jobs/digits/ps_desired");
        assert_eq!(common(&["--root", "/"]).keys().ps_desired(), "/ps_desired");
        assert_eq!(common(&["--root", "/a/b"]).keys().ps_desired(), "/a/b/ps_desired");
    }

    #[test]
    fn an_advertised_host_gets_the_bound_port() {
        let bound: SocketAddr = "0.0.0.0:4711".parse().unwrap();
        let advertised = |it: &str| common(&["--advertise", it]).advertised(bound).unwrap();
        assert_eq!(advertised("node-1"), "node-1:4711");
        assert_eq!(advertised("node-1:0"), "node-1:4711");
        assert_eq!(advertised("node-1:80"), "node-1:80");
        assert_eq!(advertised("[::1]"), "[::1]:4711");
        assert_eq!(advertised("[::1]:80"), "[::1]:80");
        assert!(advertised_host("::1").is_err());
        assert!(advertised_host("a:b").is_err());
    }

    #[test]
    fn an_address_of_this_host_only_is_not_advertised() {
        let bound: SocketAddr = "0.0.0.0:4711".parse().unwrap();
        assert!(common(&[]).advertised(bound).unwrap_err().message.contains("--advertise"));
        // No packet is sent; the system only selects a local address.
        let args = common(&["--etcd-endpoints", "http://192.0.2.1:2379"]);
        match address_towards("http://192.0.2.1:2379") {
            Some(own) if !own.is_loopback() => {
                assert_eq!(args.advertised(bound).unwrap(), format!("{own}:4711"));
            }
            // A machine without a network.
            Some(_) | None => assert!(args.advertised(bound).is_err()),
        }
        let bound: SocketAddr = "127.0.0.1:4711".parse().unwrap();
        assert_eq!(common(&[]).advertised(bound).unwrap(), "127.0.0.1:4711");
    }

    #[test]
    fn etcd_over_tls_is_verified_with_our_ca_unless_another_is_configured() {
        let ca = |more: &[&str]| {
            let args = [&["--tls", "/tls", "--etcd-endpoints"], more].concat();
            common(&args).etcd_options().ca_file
        };
        assert_eq!(ca(&["https://etcd:2379"]), Some("/tls/ca.crt".into()));
        assert_eq!(ca(&["http://etcd:2379"]), None);
        assert_eq!(ca(&["https://etcd:2379", "--etcd-ca", "/ca"]), Some("/ca".into()));
    }

    /// As for etcdctl: plaintext, or TLS if there are certificates for it.
    #[test]
    fn an_endpoint_may_be_a_host_and_a_port() {
        let urls = |more: &[&str]| {
            let endpoints = "--etcd-endpoints=etcd:2379,[::1]:2379,http://other:2379/";
            common(&[&[endpoints], more].concat()).etcd_options().endpoints
        };
        assert_eq!(urls(&[]), ["http://etcd:2379", "http://[::1]:2379", "http://other:2379"]);
        let secured = ["https://etcd:2379", "https://[::1]:2379", "http://other:2379"];
        assert_eq!(urls(&["--etcd-ca", "/ca"]), secured);
        for wrong in ["etcd", "etcd:", "etcd:port", "ftp://etcd:2379", "a b:2379", "http://"] {
            assert!(endpoint(wrong).is_err(), "{wrong}");
        }
        assert!(endpoint("http://me@etcd:2379").unwrap_err().contains("--etcd-user"));
    }
}

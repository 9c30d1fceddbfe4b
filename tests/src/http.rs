//! A minimal HTTP client for admin ports, and requests with invalid bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Response to a GET request.
#[derive(Clone, Debug)]
pub struct HttpReply {
    pub code: u16,
    pub head: String,
    pub body: String,
}

/// Requests `path` from `address`; returns `None` without a response.
pub fn get(address: &str, path: &str) -> Option<HttpReply> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n");
    let text = exchange(TcpStream::connect(address).ok()?, request.as_bytes(), || {});
    let (head, body) = text.split_once("\r\n\r\n")?;
    let code = head.split(' ').nth(1)?.parse().ok()?;
    let is_chunked = head.to_lowercase().contains("transfer-encoding: chunked");
    let body = if is_chunked { joined(body)? } else { body.to_owned() };
    Some(HttpReply { code, head: head.to_owned(), body })
}

/// Joins the parts of a chunked body.
fn joined(mut chunks: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (length, rest) = chunks.split_once("\r\n")?;
        let (chunk, rest) = rest.split_at_checked(usize::from_str_radix(length, 16).ok()?)?;
        if chunk.is_empty() {
            return Some(body);
        }
        body.push_str(chunk);
        chunks = rest.strip_prefix("\r\n")?;
    }
}

/// Sends invalid bytes, and waits until the server answers or closes the connection.
pub fn send_garbage(address: &str) {
    let bytes: Vec<u8> =
        (0..4096_u32).map(|it| (it.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff";
    for bytes in [bytes.as_slice(), preface, b""] {
        let stream = TcpStream::connect(address)
            .unwrap_or_else(|error| panic!("cannot connect to {address}: {error}"));
        let half_closed = stream.try_clone().expect("a socket can be shared");
        exchange(stream, bytes, || drop(half_closed.shutdown(Shutdown::Write)));
    }
}

/// Sends `bytes`, calls `when_sent`, and reads until the server closes the connection.
fn exchange(mut stream: TcpStream, bytes: &[u8], when_sent: impl FnOnce()) -> String {
    stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout above zero is fine");
    // The server may close the connection before it has read everything.
    let _ = stream.write_all(bytes);
    when_sent();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

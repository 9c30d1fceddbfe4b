//! Network stores, against a minimal local server.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use steadfast_store::{StoreError, expand, open};

const BODY: &[u8] = b"0123456789";

/// Serves `BODY` at `/data.bin`, with ranges; returns the address, and a channel with the head of each
/// request.
fn serve() -> (SocketAddr, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (heads, received) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            if let Ok(head) = answer(stream.unwrap()) {
                let _ = heads.send(head);
            }
        }
    });
    (address, received)
}

fn answer(stream: TcpStream) -> std::io::Result<String> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while reader.read_line(&mut head)? > 2 {}
    let lower = head.to_lowercase();
    let length = lower.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    reader.read_exact(&mut body)?;

    let range = lower.split("range: bytes=").nth(1).and_then(|rest| rest.lines().next());
    let (status, range) = match range.and_then(|range| range.split_once('-')) {
        _ if !lower.contains("/data.bin") => ("404 Not Found", 0..0),
        Some((first, last)) => {
            let last: usize = last.parse().unwrap();
            ("206 Partial Content", first.parse().unwrap()..BODY.len().min(last + 1))
        }
        None => ("200 OK", 0..BODY.len()),
    };
    let body = if status.starts_with("404") { &[][..] } else { &BODY[range.clone()] };
    let mut reply = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
    reply += "ETag: \"1\"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nConnection: close\r\n";
    if status.starts_with("206") {
        let (start, end, all) = (range.start, range.end - 1, BODY.len());
        reply += &format!("Content-Range: bytes {start}-{end}/{all}\r\n");
    }
    let stream = reader.get_mut();
    stream.write_all((reply + "\r\n").as_bytes())?;
    if !head.starts_with("HEAD") {
        stream.write_all(body)?;
    }
    Ok(head)
}

#[tokio::test]
async fn objects_of_an_http_server_are_read() {
    let (address, _) = serve();
    let object = open(&format!("http://{address}/data.bin")).unwrap();
    assert_eq!(object.size().await.unwrap(), Some(10));
    assert_eq!(object.read().await.unwrap(), BODY);
    assert_eq!(object.read_range(2..5).await.unwrap(), "234");
    assert_eq!(expand(object.url()).await.unwrap().locations[0].url(), object.url());
    let missing = open(&format!("http://{address}/missing")).unwrap();
    assert_eq!(missing.size().await.unwrap(), None);
    let error = missing.read().await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    let error = missing.create(bytes::Bytes::from(BODY)).await.unwrap_err();
    assert!(matches!(error, StoreError::Unsupported { .. }), "{error}");
}

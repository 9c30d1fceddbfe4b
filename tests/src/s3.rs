//! An S3 server for tests: moto, in a separate process.

use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::{Process, Scene, Signal, eventually, examples, free_address, python, within};

const PACKAGES: [&str; 1] = ["moto[s3,server]>=5.1,<6"];

const BUCKET: &str = "steadfast";

/// Creates the bucket with the data of the example.
const FILL: &str = r#"
import sys, boto3
endpoint, bucket, path = sys.argv[1:]
s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1",
                  aws_access_key_id="any", aws_secret_access_key="any")
s3.create_bucket(Bucket=bucket)
s3.upload_file(path, bucket, "digits.parquet")
"#;

/// Creates an object with a text.
const PUT: &str = r#"
import sys, boto3
endpoint, bucket, name, text = sys.argv[1:]
s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1",
                  aws_access_key_id="any", aws_secret_access_key="any")
s3.put_object(Bucket=bucket, Key=name, Body=text.encode())
"#;

/// Prints the names and the ETags of all objects; the ETag of a multipart upload ends with the number of
/// parts.
const LIST: &str = r#"
import sys, boto3
endpoint, bucket = sys.argv[1:]
s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1",
                  aws_access_key_id="any", aws_secret_access_key="any")
for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
    for it in page.get("Contents", []):
        print(it["Key"], it["ETag"])
"#;

/// An S3 server with one bucket that contains `digits.parquet`.
#[derive(Debug)]
pub struct S3Server {
    python: PathBuf,
    process: Process,
    port: u16,
}

impl S3Server {
    /// Starts a server. Returns `None`, with a message, if the Python package is missing.
    pub fn start(scene: &Scene) -> Option<Self> {
        let python = python("moto", &PACKAGES)?;
        let address = free_address();
        let mut command = scene.command(&python);
        command
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p"])
            .arg(address.port().to_string());
        let process = Process::start(scene.directory(), "s3", &mut command);
        within(Duration::from_secs(60), "the S3 server listens", || {
            TcpStream::connect(address).ok()
        });
        let server = Self { python, process, port: address.port() };
        let data = examples().join("data/digits.parquet");
        server.run(FILL, &[&data.display().to_string()]);
        Some(server)
    }

    /// Returns the URL of an object in the bucket.
    pub fn url(&self, name: &str) -> String {
        format!("s3://{BUCKET}/{name}")
    }

    /// Returns the endpoint URL.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Creates an object.
    pub fn put(&self, name: &str, text: &str) {
        self.run(PUT, &[name, text]);
    }

    /// Stops the server until [`S3Server::resume`]; returns once a client waits for it.
    pub fn stop_answering(&self) {
        self.process.signal(Signal::SIGSTOP);
        let is_connected =
            || has_unread(self.port, &fs::read_to_string("/proc/net/tcp").ok()?).then_some(());
        eventually("a client waits for the silent S3 server", is_connected);
    }

    pub fn resume(&self) {
        self.process.signal(Signal::SIGCONT);
    }

    /// Returns the names of all objects.
    pub fn objects(&self) -> Vec<String> {
        self.tagged().into_iter().map(|(name, _)| name).collect()
    }

    /// Returns the names of objects from multipart uploads.
    pub fn objects_in_parts(&self) -> Vec<String> {
        let several = |tag: &str| tag.contains('-') && !tag.contains("-1\"");
        self.tagged().into_iter().filter(|(_, tag)| several(tag)).map(|(name, _)| name).collect()
    }

    fn tagged(&self) -> Vec<(String, String)> {
        let pair = |line: &str| line.split_once(' ').map(|(name, tag)| (name.into(), tag.into()));
        self.run(LIST, &[]).lines().filter_map(pair).collect()
    }

    fn run(&self, script: &str, more: &[&str]) -> String {
        let mut command = Command::new(&self.python);
        command.args(["-c", script, &self.endpoint(), BUCKET]).args(more);
        let output = command.output().expect("python starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("names are text")
    }
}

/// Returns whether the kernel holds unread data or unaccepted connections for `port`, from the content of
/// `/proc/net/tcp`: fields 1 and 4 of a line are the local address and the two queues.
fn has_unread(port: u16, sockets: &str) -> bool {
    let local = format!(":{port:04X}");
    sockets.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let unread = fields.get(4).and_then(|queues| queues.split_once(':'));
        fields.get(1).is_some_and(|address| address.ends_with(&local))
            && unread.is_some_and(|(_, unread)| unread.bytes().any(|digit| digit != b'0'))
    })
}

//! Clients of network stores, configured by the usual environment variables, or by files that these name.

use std::ffi::OsString;
use std::io;
use std::sync::Arc;

use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::http::HttpBuilder;
use object_store::{ClientOptions, ObjectStore, parse_url_opts};
use url::Url;

use crate::error::StoreError;
use crate::root::{Client, SecretFile};

/// Maximum idle time of a connection. It also limits the upload of one part while others share the link:
/// four parts of 8 MiB at 512 KiB/s.
const SILENCE_MAX: &str = "70 seconds";
/// Time limit of one request; that of a whole operation depends on its size, see `location`.
const REQUEST_MAX: &str = "1 hour";

/// The environment variables that configure a kind of store. Names are in lower case.
struct Family {
    /// The prefix of the family's variables.
    prefix: &'static str,
    /// Further variables, without the prefix.
    extra: &'static [&'static str],
    /// Variables that set a custom endpoint.
    endpoints: &'static [&'static str],
    /// Variables that configure credentials.
    credentials: &'static [&'static str],
    /// Variables whose value may be in a file named by `<variable>_FILE`, as is usual in containers.
    secrets: &'static [&'static str],
    skip_signature: &'static str,
}

const AWS: Family = Family {
    prefix: "aws_",
    extra: &[],
    endpoints: &["aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3"],
    credentials: &[
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_web_identity_token_file",
        "aws_container_credentials_relative_uri",
        "aws_container_credentials_full_uri",
        "aws_metadata_endpoint",
        "aws_skip_signature",
    ],
    secrets: &["aws_access_key_id", "aws_secret_access_key", "aws_session_token"],
    skip_signature: "aws_skip_signature",
};

const GOOGLE: Family = Family {
    prefix: "google_",
    extra: &["service_account"],
    endpoints: &["google_base_url"],
    credentials: &[
        "service_account",
        "google_service_account",
        "google_service_account_path",
        "google_service_account_key",
        "google_application_credentials",
        "google_bearer_token",
        "google_skip_signature",
    ],
    secrets: &["google_service_account_key", "google_bearer_token"],
    skip_signature: "google_skip_signature",
};

const AZURE: Family = Family {
    prefix: "azure_",
    extra: &["identity_endpoint"],
    endpoints: &["azure_storage_endpoint", "azure_endpoint"],
    credentials: &[
        "azure_storage_account_key",
        "azure_storage_access_key",
        "azure_storage_master_key",
        "azure_storage_client_secret",
        "azure_client_secret",
        "azure_storage_sas_key",
        "azure_storage_sas_token",
        "azure_storage_token",
        "azure_storage_use_emulator",
        "azure_federated_token_file",
        "azure_fabric_session_token",
        "azure_use_azure_cli",
        "azure_msi_endpoint",
        "azure_identity_endpoint",
        "identity_endpoint",
        "azure_credential_type",
        "azure_skip_signature",
    ],
    secrets: &[
        "azure_storage_account_key",
        "azure_storage_client_secret",
        "azure_storage_sas_token",
        "azure_storage_token",
    ],
    skip_signature: "azure_skip_signature",
};

/// Creates the client of the store at `base` from the variables in `environment`.
pub(crate) fn connect(
    base: &Url,
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Client, StoreError> {
    // Fails if the process has already installed a provider, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let failed = |source: object_store::Error| StoreError::Configuration {
        url: base.as_str().to_owned(),
        source: source.into(),
    };
    let family = match base.scheme() {
        "http" | "https" => {
            let store = http_store(base).map_err(failed)?;
            return Ok(Client::of(store));
        }
        "s3" | "s3a" => &AWS,
        "gs" => &GOOGLE,
        _ => &AZURE,
    };
    let read = variables(family, environment).and_then(|(variables, secrets)| {
        check_endpoint(family, &variables)?;
        Ok((variables, secrets))
    });
    let (variables, secrets) = read.map_err(|source| StoreError::Configuration {
        url: base.as_str().to_owned(),
        source: source.into(),
    })?;
    let options = options(family, variables);
    if family.prefix == AWS.prefix {
        let store = Arc::new(s3_store(base, options).map_err(failed)?);
        return Ok(Client { store: store.clone(), pages: Some(store), secrets });
    }
    let (store, _) = parse_url_opts(base, options).map_err(failed)?;
    Ok(Client { store: Arc::from(store), pages: None, secrets })
}

fn s3_store(base: &Url, options: Vec<(String, String)>) -> object_store::Result<AmazonS3> {
    let known = options.into_iter().filter_map(|(name, value)| Some((name.parse().ok()?, value)));
    let builder = AmazonS3Builder::new().with_url(base.as_str());
    known.fold(builder, |builder, (key, value)| builder.with_config(key, value)).build()
}

fn http_store(base: &Url) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    use object_store::ClientConfigKey as Key;
    let client = ClientOptions::new()
        .with_allow_http(true)
        .with_config(Key::Timeout, REQUEST_MAX)
        .with_config(Key::ReadTimeout, SILENCE_MAX);
    let store = HttpBuilder::new().with_url(base.as_str()).with_client_options(client).build()?;
    Ok(Arc::new(store))
}

/// Names and values of environment variables.
type Variables = Vec<(String, String)>;

/// Returns the set variables of a family, with names in lower case and with secrets read from their files, and these
/// files.
fn variables(
    family: &Family,
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> io::Result<(Variables, Vec<SecretFile>)> {
    let mut files = Vec::new();
    let mut variables: Variables = environment
        .filter_map(|(name, value)| {
            Some((name.into_string().ok()?.to_ascii_lowercase(), value.into_string().ok()?))
        })
        .filter(|(name, value)| {
            let ours = name.starts_with(family.prefix) || family.extra.contains(&name.as_str());
            ours && !value.is_empty()
        })
        .collect();
    for secret in family.secrets {
        let named = format!("{secret}_file");
        let Some(at) = variables.iter().position(|(name, _)| *name == named) else { continue };
        let (_, path) = variables.swap_remove(at);
        let (variable, named) = (secret.to_uppercase(), named.to_uppercase());
        if variables.iter().any(|(name, _)| name == secret) {
            let message = format!("both {variable} and {named} are set; unset one of them");
            return Err(io::Error::other(message));
        }
        let text = std::fs::read_to_string(&path).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("cannot read {path}, which {named} names: {error}"),
            )
        })?;
        let value = text.trim_end_matches(['\r', '\n']).to_owned();
        variables.push(((*secret).to_owned(), value));
        files.push(SecretFile { path: path.into(), text });
    }
    Ok((variables, files))
}

/// Rejects an endpoint that is not a URL, because the client would panic at its first request.
fn check_endpoint(family: &Family, variables: &[(String, String)]) -> io::Result<()> {
    for (name, value) in variables {
        let is_endpoint = family.endpoints.contains(&name.as_str());
        let is_url = Url::parse(value)
            .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        if is_endpoint && !is_url {
            let name = name.to_uppercase();
            return Err(io::Error::other(format!(
                "{name} is `{value}`, which is no URL; write http://HOST:PORT or https://HOST:PORT"
            )));
        }
    }
    Ok(())
}

/// Returns the client's options: the defaults, then the variables of its family, which take precedence.
fn options(family: &Family, variables: Vec<(String, String)>) -> Vec<(String, String)> {
    let one_of = |names: &[&str]| {
        variables.iter().find(|(name, _)| names.contains(&name.as_str())).map(|(_, value)| value)
    };

    let mut options = vec![
        ("timeout".to_owned(), REQUEST_MAX.to_owned()),
        ("read_timeout".to_owned(), SILENCE_MAX.to_owned()),
    ];
    if let Some(endpoint) = one_of(family.endpoints) {
        if endpoint.starts_with("http://") {
            options.push(("allow_http".to_owned(), "true".to_owned()));
        }
        // Without credentials the client would request some from the cloud's metadata address, which
        // does not exist near a custom server: every request would hang instead of failing.
        if one_of(family.credentials).is_none() {
            options.push((family.skip_signature.to_owned(), "true".to_owned()));
        }
    }
    options.extend(variables);
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::{Root, Upload};

    fn options_of(family: &Family, variables: &[(&str, &str)]) -> Vec<(String, String)> {
        options(family, set(family, variables).unwrap())
    }

    fn set(family: &Family, all: &[(&str, &str)]) -> io::Result<Vec<(String, String)>> {
        let environment = all.iter().map(|(name, value)| (name.into(), value.into()));
        variables(family, environment).map(|(variables, _)| variables)
    }

    fn has(options: &[(String, String)], name: &str, value: &str) -> bool {
        options.iter().any(|option| option.0 == name && option.1 == value)
    }

    #[test]
    fn an_endpoint_that_is_no_url_is_rejected_by_name() {
        let open = |url: &str, name: &str, value: &str| {
            let environment = [(name.into(), value.into())].into_iter();
            connect(&Url::parse(url).unwrap(), environment).map(|_| ())
        };
        for (url, name) in [
            ("s3://bucket/", "AWS_ENDPOINT"),
            ("s3://bucket/", "AWS_ENDPOINT_URL"),
            ("s3://bucket/", "AWS_ENDPOINT_URL_S3"),
            ("gs://bucket/", "GOOGLE_BASE_URL"),
            ("az://container/", "AZURE_STORAGE_ENDPOINT"),
        ] {
            for value in ["minio:9000", "127.0.0.1:9000", "minio", "ftp://minio", "http://"] {
                let error = open(url, name, value).unwrap_err().to_string();
                assert!(error.contains(&format!("{name} is `{value}`")), "{error}");
            }
        }
        assert!(open("s3://bucket/", "AWS_ENDPOINT", "http://minio:9000").is_ok());
    }

    #[test]
    fn requests_to_a_custom_endpoint_without_credentials_are_unsigned() {
        let cases = [
            (&AWS, "AWS_ENDPOINT", "AWS_ACCESS_KEY_ID"),
            (&GOOGLE, "GOOGLE_BASE_URL", "GOOGLE_SERVICE_ACCOUNT"),
            (&AZURE, "AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_KEY"),
        ];
        for (family, endpoint, credential) in cases {
            let none = options_of(family, &[(endpoint, "http://127.0.0.1:9")]);
            assert!(has(&none, family.skip_signature, "true"), "{none:?}");
            assert!(has(&none, "allow_http", "true"), "{none:?}");
            let some = options_of(family, &[(endpoint, "https://store"), (credential, "x")]);
            assert!(!has(&some, family.skip_signature, "true"), "{some:?}");
            assert!(!has(&some, "allow_http", "true"), "{some:?}");
        }
    }

    /// Answers the next request that there is no such object; returns its head in lower case.
    fn refuse_one(listener: &std::net::TcpListener) -> String {
        use std::io::{BufRead, BufReader, Write};
        let (stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while reader.read_line(&mut head).unwrap() > 2 {}
        let refusal = "HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
        reader.get_mut().write_all(refusal.as_bytes()).unwrap();
        head.to_lowercase()
    }

    /// A client that requests credentials first would contact the metadata address, not the server.
    #[tokio::test]
    async fn the_first_request_goes_to_the_configured_endpoint() {
        let cases = [
            ("s3://bucket/", "AWS_ENDPOINT", None),
            ("gs://bucket/", "GOOGLE_BASE_URL", None),
            ("az://bucket/", "AZURE_STORAGE_ENDPOINT", Some(("AZURE_STORAGE_ACCOUNT_NAME", "a"))),
        ];
        for (base, endpoint, more) in cases {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let server = std::thread::spawn(move || refuse_one(&listener));
            let environment = [(endpoint, url.as_str())].into_iter().chain(more);
            let environment = environment.map(|(name, value)| (name.into(), value.into()));
            let store = connect(&Url::parse(base).unwrap(), environment).unwrap().store;
            let answer = store.get_opts(&"x".into(), Default::default()).await;
            assert!(matches!(answer, Err(object_store::Error::NotFound { .. })), "{answer:?}");
            let head = server.join().unwrap();
            assert!(!head.contains("authorization"), "{head}");
        }
    }

    /// F50: a process outlives the credentials that it begins with.
    #[tokio::test]
    async fn a_secret_that_changes_in_its_file_is_used_from_the_next_request_on() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("id");
        std::fs::write(&file, "first\n").unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let environment: Vec<(OsString, OsString)> = vec![
            ("AWS_ENDPOINT".into(), endpoint.into()),
            ("AWS_ACCESS_KEY_ID_FILE".into(), (&file).into()),
            ("AWS_SECRET_ACCESS_KEY".into(), "secret".into()),
        ];
        let base = Url::parse("s3://bucket/").unwrap();
        let connect = move |base: &Url| connect(base, environment.clone().into_iter());
        let root = Root::new(&base, Upload::InParts, connect).unwrap();
        let (heads_tx, heads) = std::sync::mpsc::channel();
        let server = move || (0..3).for_each(|_| heads_tx.send(refuse_one(&listener)).unwrap());
        let server = std::thread::spawn(server);
        let credential = async || {
            root.client().store.get_opts(&"x".into(), Default::default()).await.unwrap_err();
            let head = heads.recv().unwrap();
            let (_, rest) = head.split_once("credential=").expect("the request is signed");
            rest.split('/').next().unwrap().to_owned()
        };
        assert_eq!(credential().await, "first");
        std::fs::write(&file, "second\n").unwrap();
        assert_eq!(credential().await, "second");
        // Programs that replace a secret may remove it first.
        std::fs::remove_file(&file).unwrap();
        assert_eq!(credential().await, "second");
        server.join().unwrap();
    }

    /// Answers listings of the sorted `keys` of a bucket as S3 does, with pages of at most 20 names.
    fn serve_listings(keys: &'static [String]) -> String {
        use std::io::{BufRead, BufReader, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut reader = BufReader::new(stream.unwrap());
                let (mut head, mut line) = (String::new(), String::new());
                reader.read_line(&mut head).unwrap();
                while reader.read_line(&mut line).unwrap() > 2 {
                    line.clear();
                }
                let target = head.split(' ').nth(1).unwrap();
                let body = listing(keys, &Url::parse("http://s3").unwrap().join(target).unwrap());
                let status = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length";
                let answer = format!("{status}: {}\r\n\r\n{body}", body.len());
                reader.get_mut().write_all(answer.as_bytes()).unwrap();
            }
        });
        url
    }

    fn listing(keys: &[String], request: &Url) -> String {
        let value =
            |name| request.query_pairs().find(|it| it.0 == name).map(|it| it.1.into_owned());
        let prefix = value("prefix").unwrap_or_default();
        let after = value("continuation-token").or(value("start-after")).unwrap_or_default();
        let names_max = value("max-keys").map_or(20, |it| it.parse().unwrap()).min(20);
        let (mut names, mut xml) = (0, String::new());
        let mut last: Option<String> = None;
        for key in keys.iter().filter(|key| key.starts_with(&prefix) && after < **key) {
            if last.as_ref().is_some_and(|last| key < last) {
                continue;
            }
            if names == names_max {
                let token = last.unwrap();
                xml += &format!("<NextContinuationToken>{token}</NextContinuationToken>");
                break;
            }
            names += 1;
            let rest = &key[prefix.len()..];
            let directory = rest.find('/').filter(|_| value("delimiter").is_some());
            last = Some(match directory {
                Some(end) => {
                    let name = format!("{prefix}{}", &rest[..=end]);
                    xml += &format!("<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>");
                    format!("{name}{}", char::MAX)
                }
                None => {
                    let time = "2026-01-02T03:04:05.000Z";
                    xml += &format!(
                        "<Contents><Key>{key}</Key><Size>7</Size><LastModified>{time}</LastModified></Contents>"
                    );
                    key.clone()
                }
            });
        }
        format!("<ListBucketResult>{xml}</ListBucketResult>")
    }

    /// Programs that join paths carelessly write such keys.
    #[tokio::test]
    async fn a_key_that_cannot_be_a_path_hides_no_other_object() {
        use crate::listing::{Depth, Odd, of_pages, of_store};
        let mut keys: Vec<String> = (0..50).map(|i| format!("logs/{i:02}.csv")).collect();
        keys.extend(
            ["logs//a.csv", "logs//b.csv", "logs/17//x.csv", "logs/17/y.csv"].map(str::to_owned),
        );
        keys.sort();
        let keys: &[String] = keys.leak();
        let environment = [("AWS_ENDPOINT", serve_listings(keys))];
        let environment = environment.into_iter().map(|(name, value)| (name.into(), value.into()));
        let client = connect(&Url::parse("s3://bucket/").unwrap(), environment).unwrap();
        let (prefix, pages) = ("logs".into(), client.pages.unwrap());
        let error = of_store(&*client.store, &prefix, Depth::All).await.unwrap_err();
        assert!(crate::listing::odd_name(&error).is_some(), "{error}");

        let found = of_pages(&*pages, &prefix, Depth::All).await.unwrap();
        let names: Vec<&str> = found.objects.iter().map(|it| &*it.name).collect();
        let expected: Vec<&str> = keys
            .iter()
            .filter_map(|key| key.strip_prefix("logs/"))
            .filter(|it| !it.contains("//") && !it.starts_with('/'))
            .collect();
        assert_eq!(names, expected);
        let odd: Vec<&str> = found.odd.iter().map(Odd::name).collect();
        assert_eq!(odd, ["/a.csv", "/b.csv", "17//x.csv"]);

        let found = of_pages(&*pages, &prefix, Depth::One).await.unwrap();
        assert_eq!((found.objects.len(), &found.directories[..]), (50, &["17".to_owned()][..]));
        assert_eq!(found.odd, [Odd::Directory("/".to_owned())]);
    }

    #[test]
    fn a_secret_may_be_in_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "s3cr3t\n").unwrap();
        let path = file.path().to_str().unwrap();
        let named = ("AWS_SECRET_ACCESS_KEY_FILE", path);
        let options = options_of(&AWS, &[named, ("AWS_ENDPOINT", "http://store")]);
        assert!(has(&options, "aws_secret_access_key", "s3cr3t"), "{options:?}");
        assert!(!has(&options, "aws_skip_signature", "true"), "{options:?}");
        assert!(options.iter().all(|(name, _)| name != "aws_secret_access_key_file"));

        let both = set(&AWS, &[named, ("AWS_SECRET_ACCESS_KEY", "x")]).unwrap_err();
        assert!(both.to_string().contains("unset one of them"), "{both}");
        let dead =
            set(&AWS, &[("AWS_SECRET_ACCESS_KEY_FILE", "/no/such")]).unwrap_err().to_string();
        assert!(dead.contains("/no/such") && dead.contains("AWS_SECRET_ACCESS_KEY_FILE"), "{dead}");
    }

    #[test]
    fn requests_to_the_default_endpoint_are_signed() {
        assert!(!has(&options_of(&AWS, &[]), "aws_skip_signature", "true"));
    }

    #[test]
    fn variables_override_defaults_and_unrelated_ones_are_ignored() {
        let options = options_of(&AWS, &[("AWS_TIMEOUT", "5 seconds"), ("SECRET", "x")]);
        let position = |name: &str| options.iter().position(|option| option.0 == name);
        assert!(position("aws_timeout") > position("timeout"));
        assert_eq!(position("secret"), None);
    }
}

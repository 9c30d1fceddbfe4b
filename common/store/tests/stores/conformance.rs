//! Conformance tests for all kinds of stores, run on local files and on memory.

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use steadfast_store::{
    Created, ErrorKind, Location, ObjectWriter, StoreError, expand, list_matching, open,
};

/// Runs `rules` on a fresh directory of each kind of store.
async fn on_each<F: Future<Output = ()>>(name: &str, rules: impl Fn(Location) -> F) {
    let directory = tempfile::tempdir().unwrap();
    rules(open(directory.path().to_str().unwrap()).unwrap()).await;
    rules(open(&format!("memory://{name}/directory")).unwrap()).await;
}

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

async fn put(directory: &Location, names: &[&str]) {
    for name in names {
        directory.child(name).unwrap().write(bytes(name)).await.unwrap();
    }
}

#[tokio::test]
async fn a_read_returns_the_last_write() {
    on_each("written-last", |directory| async move {
        let object = directory.child("a/b c%.txt").unwrap();
        assert_eq!(object.size().await.unwrap(), None);
        object.write(bytes("old")).await.unwrap();
        object.write(bytes("newer")).await.unwrap();
        assert_eq!(object.read().await.unwrap(), "newer");
        assert_eq!(object.size().await.unwrap(), Some(5));
        let again = open(object.url()).unwrap();
        assert_eq!(again.url(), object.url());
        assert_eq!(again.read().await.unwrap(), "newer");
        directory.child("empty").unwrap().write(Bytes::new()).await.unwrap();
        assert!(directory.child("empty").unwrap().read().await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test]
async fn a_range_is_read_completely_or_not_at_all() {
    on_each("ranges", |directory| async move {
        let object = directory.child("x").unwrap();
        object.write(bytes("0123456789")).await.unwrap();
        assert_eq!(object.read_range(2..5).await.unwrap(), "234");
        assert_eq!(object.read_range(10..10).await.unwrap(), "");
        let error = object.read_range(8..12).await.unwrap_err();
        assert!(matches!(error, StoreError::OutOfRange { start: 8, end: 12, .. }), "{error}");
        assert!(object.read_range(20..30).await.is_err());
        assert!(object.read_range(0..u64::MAX).await.is_err());
        let ranges = object.read_ranges(&[5..6, 0..2, 9..10]).await.unwrap();
        assert_eq!(ranges, ["5", "01", "9"]);
        assert!(object.read_ranges(&[0..1, 9..11]).await.is_err());
    })
    .await;
}

#[tokio::test]
async fn the_chunks_of_an_object_are_the_whole_object_in_order() {
    on_each("chunks", |directory| async move {
        let content: Vec<u8> = (0..9_000_000_u32).map(|it| (it % 251) as u8).collect();
        let object = directory.child("x").unwrap();
        object.write(content.clone().into()).await.unwrap();
        let chunks = object.read_in_chunks(content.len() as u64).try_collect::<Vec<_>>().await;
        let chunks = chunks.unwrap();
        assert!(1 < chunks.len() && chunks.concat() == content);
        let beyond = object.read_in_chunks(content.len() as u64 + 1);
        assert!(beyond.try_collect::<Vec<_>>().await.is_err());
        assert!(object.read_in_chunks(0).next().await.is_none());
    })
    .await;
}

#[tokio::test]
async fn an_object_that_is_written_piece_by_piece_appears_when_it_is_whole() {
    on_each("pieces", |directory| async move {
        let content: Vec<u8> = (0..70_000_000_u32).map(|it| (it % 251) as u8).collect();
        for size in [9, 33_554_432, content.len()] {
            let object = directory.child(&format!("{size}")).unwrap();
            let mut writer = ObjectWriter::new(object.clone());
            for piece in content[..size].chunks(1_000_003) {
                writer.push(piece).await.unwrap();
            }
            assert_eq!(object.size().await.unwrap(), None);
            writer.abort().await;
            let mut writer = ObjectWriter::new(object.clone());
            writer.push(&content[..size]).await.unwrap();
            writer.finish().await.unwrap();
            assert!(object.read().await.unwrap() == content[..size]);
            for (name, expected) in
                [(size.to_string(), Created::Already), (format!("{size} new"), Created::Now)]
            {
                let mut writer = ObjectWriter::new(directory.child(&name).unwrap());
                writer.push(&content[..size]).await.unwrap();
                assert_eq!(writer.finish_new().await.unwrap(), expected);
            }
        }
        assert_eq!(directory.list().await.unwrap().len(), 6);
    })
    .await;
}

/// F36
#[tokio::test]
async fn of_concurrent_creates_exactly_one_succeeds() {
    on_each("create", |directory| async move {
        let object = directory.child("deep/down/marker").unwrap();
        let all = (0..8).map(|i| {
            let object = object.clone();
            tokio::spawn(async move { (i, object.create(bytes(&i.to_string())).await.unwrap()) })
        });
        let outcomes = futures::future::join_all(all).await;
        let winners: Vec<i32> = outcomes
            .into_iter()
            .map(Result::unwrap)
            .filter(|(_, created)| *created == Created::Now)
            .map(|(i, _)| i)
            .collect();
        assert_eq!(winners.len(), 1);
        assert_eq!(object.read().await.unwrap(), winners[0].to_string());
    })
    .await;
}

#[tokio::test]
async fn deleting_a_missing_object_succeeds() {
    on_each("delete", |directory| async move {
        let object = directory.child("x").unwrap();
        object.delete().await.unwrap();
        object.write(bytes("x")).await.unwrap();
        object.delete().await.unwrap();
        let error = object.read().await.unwrap_err();
        assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Permanent);
        assert_eq!(error.to_string(), format!("{} does not exist", object.url()));
    })
    .await;
}

#[tokio::test]
async fn a_list_has_everything_below_its_prefix_and_nothing_else() {
    on_each("list", |directory| async move {
        assert_eq!(directory.list().await.unwrap(), []);
        put(&directory, &["in/b", "in/a/z", "in/a/y", "inside", "out/x"]).await;
        let listed = directory.child("in").unwrap().list().await.unwrap();
        let expected = [("a/y", 6), ("a/z", 6), ("b", 4)].map(|(n, s)| (n.to_owned(), s));
        assert_eq!(listed, expected);
        for (name, _) in listed {
            directory.child("in").unwrap().child(&name).unwrap().read().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_wildcard_matches_as_in_a_shell_and_sorts() {
    on_each("expand", |directory| async move {
        put(
            &directory,
            &["b.csv", "a.csv", "a.csv.bak", "x1/d.csv", "x2/c.csv", "x2/y/e.csv", "[a].txt"],
        )
        .await;
        let root = directory.url().trim_end_matches('/').to_owned();
        let found = |pattern: &'static str| {
            let root = root.clone();
            async move {
                let found = expand(&format!("{root}/{pattern}")).await.unwrap().locations;
                let relative = |l: &Location| l.url()[root.len() + 1..].to_owned();
                found.iter().map(relative).collect::<Vec<_>>()
            }
        };
        assert_eq!(found("*.csv").await, ["a.csv", "b.csv"]);
        assert_eq!(found("?.csv").await, ["a.csv", "b.csv"]);
        assert_eq!(found("*/*.csv").await, ["x1/d.csv", "x2/c.csv"]);
        assert_eq!(found("x?/c.csv").await, ["x2/c.csv"]);
        assert_eq!(found("*/y/e.csv").await, ["x2/y/e.csv"]);
        assert_eq!(found("x2/**").await, ["x2/c.csv", "x2/y/e.csv"]);
        assert_eq!(
            found("**/*.csv").await,
            ["a.csv", "b.csv", "x1/d.csv", "x2/c.csv", "x2/y/e.csv"]
        );
        assert_eq!(found("%5Ba%5D.*").await, ["[a].txt"]);
        assert_eq!(found("nothing.csv").await, ["nothing.csv"]);
        let pattern = format!("{root}/*.nothing");
        let error = expand(&pattern).await.unwrap_err();
        assert!(error.to_string().contains(&pattern), "{error}");
        assert!(matches!(error, StoreError::NoMatch { .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn a_wildcard_matches_a_leading_dot_only_if_it_is_written() {
    on_each("hidden", |directory| async move {
        put(&directory, &["a.csv", ".a.csv", ".b/c.csv", "d/.e.csv", "d/f.csv", "d/.g/h.csv"])
            .await;
        let root = directory.url().trim_end_matches('/').to_owned();
        for (pattern, expected) in [
            ("*", &["a.csv"][..]),
            ("?a.csv", &[]),
            (".*", &[".a.csv"]),
            ("*/*.csv", &["d/f.csv"]),
            (".*/*.csv", &[".b/c.csv"]),
            ("**/*.csv", &["a.csv", "d/f.csv"]),
            ("d/**", &["d/f.csv"]),
        ] {
            let found = list_matching(&format!("{root}/{pattern}")).await.unwrap().objects;
            let found: Vec<&str> =
                found.iter().map(|it| &it.location.url()[root.len() + 1..]).collect();
            assert_eq!(found, expected, "{pattern}");
        }
    })
    .await;
}

/// Files of other systems, and of programs that went wrong, lie in real directories.
#[cfg(unix)]
#[tokio::test]
async fn a_name_that_cannot_be_a_path_hides_no_other_file() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let directory = tempfile::tempdir().unwrap();
    for name in [&b"a.csv"[..], b"Icon\r", b"b\n.csv", b"c\xff.csv", b"in/d.csv", b"odd\n/e.csv"] {
        let path = directory.path().join(OsStr::from_bytes(name));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "x").unwrap();
    }
    std::os::unix::fs::symlink("nothing", directory.path().join("dead.csv")).unwrap();
    let root = directory.path().to_str().unwrap();
    for (pattern, files, skipped) in [
        ("*.csv", &["a.csv"][..], &["b\\n.csv", "c\u{fffd}.csv"][..]),
        ("*", &["a.csv"], &["Icon\\r", "b\\n.csv", "c\u{fffd}.csv"]),
        ("*/*.csv", &["in/d.csv"], &["odd\\n"]),
        ("**/*.csv", &["a.csv", "in/d.csv"], &["b\\n.csv", "c\u{fffd}.csv", "odd\\n"]),
        ("a.*", &["a.csv"], &[]),
    ] {
        let found = expand(&format!("{root}/{pattern}")).await.unwrap();
        let urls: Vec<&str> = found.locations.iter().map(Location::url).collect();
        let urls_of = |names: &[&str]| -> Vec<String> {
            names.iter().map(|name| format!("file://{root}/{name}")).collect()
        };
        assert_eq!(urls, urls_of(files), "{pattern}");
        assert_eq!(found.skipped, urls_of(skipped), "{pattern}");
    }
    let error = expand(&format!("{root}/b*.csv")).await.unwrap_err().to_string();
    assert!(error.ends_with("b\\n.csv`; rename them"), "{error}");
    // Old checkpoints are deleted in spite of such a file.
    let all = open(root).unwrap().list().await.unwrap();
    assert_eq!(all, [("a.csv".to_owned(), 1), ("in/d.csv".to_owned(), 1)]);
}

/// Compiles only if the futures are `Send`.
#[tokio::test]
async fn every_operation_is_send() {
    let object = open("memory://spawned/x").unwrap();
    let job = tokio::spawn(async move {
        object.write(bytes("0123")).await.unwrap();
        object.create(bytes("x")).await.unwrap();
        object.read_ranges(&[0..1, 2..3]).await.unwrap();
        object.read_range(0..object.size().await.unwrap().unwrap()).await.unwrap();
        let found = expand("memory://spawned/*").await.unwrap().locations;
        object.list().await.unwrap();
        object.delete().await.unwrap();
        found.len()
    });
    assert_eq!(job.await.unwrap(), 1);
}

#[tokio::test]
async fn a_name_cannot_escape_its_directory() {
    on_each("names", |directory| async move {
        for name in ["", "/x", "..", "../x", "a/../b", "a//b", "a\0b", "x/", "./x"] {
            let error = directory.child(name).unwrap_err();
            assert!(matches!(error, StoreError::BadName { .. }), "{name}: {error}");
        }
    })
    .await;
}

#[tokio::test]
async fn locations_of_one_memory_store_share_its_content() {
    open("memory://shared/x").unwrap().write(bytes("x")).await.unwrap();
    assert_eq!(open("memory://shared/x").unwrap().read().await.unwrap(), "x");
    assert_eq!(open("memory://other/x").unwrap().size().await.unwrap(), None);
}

#[tokio::test]
async fn a_path_is_resolved_as_the_system_does() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    std::fs::create_dir_all(root.join("real/inner")).unwrap();
    std::os::unix::fs::symlink(root.join("real/inner"), root.join("link")).unwrap();
    std::fs::write(root.join("real/data"), "here").unwrap();
    let through = root.join("link/../data");
    assert_eq!(open(through.to_str().unwrap()).unwrap().read().await.unwrap(), "here");
    let relative = open("Cargo.toml").unwrap();
    assert!(relative.url().starts_with("file:///"), "{relative}");
    assert!(relative.read().await.unwrap().starts_with(b"[package]"));
}

#[tokio::test]
async fn no_half_written_file_is_ever_seen() {
    let directory = tempfile::tempdir().unwrap();
    let object = open(directory.path().to_str().unwrap()).unwrap().child("x").unwrap();
    let contents = [b"a", b"b"].map(|byte| Bytes::from(byte.repeat(1 << 20)));
    object.write(contents[0].clone()).await.unwrap();
    let writer = {
        let (object, contents) = (object.clone(), contents.clone());
        tokio::spawn(async move {
            for i in 0..20 {
                object.write(contents[i % 2].clone()).await.unwrap();
            }
        })
    };
    while !writer.is_finished() {
        let read = object.read().await.unwrap();
        assert!(contents.contains(&read));
    }
    writer.await.unwrap();
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert_eq!(left.len(), 1);
}

#[test]
fn an_invalid_url_is_explained_without_its_secrets() {
    let message = |url: &str| open(url).unwrap_err().to_string();
    assert!(message("ftp://host/x").contains("the scheme `ftp` is not supported"));
    assert!(message("s3:///x").contains("the name of the bucket or host is missing"));
    assert!(message("file://host/x").contains("no host"));
    assert!(message("s3://bucket/../x").contains("is not a valid location"));
    let signed = message("https://host/x?signature=hush");
    assert!(signed.contains("query") && !signed.contains("hush"), "{signed}");
    let password = message("https://user:hush@host/x");
    assert!(password.contains("password") && !password.contains("hush"), "{password}");
    assert!(message("a\0b").contains("is not a valid location"));
}

#[cfg(not(feature = "cloud"))]
#[test]
fn a_build_without_clouds_names_the_missing_feature() {
    let error = open("s3://bucket/x").unwrap_err();
    assert!(error.to_string().contains("feature `cloud`"), "{error}");
}

//! Links what a static RocksDB uses.

fn main() {
    println!("cargo:rerun-if-env-changed=ROCKSDB_STATIC");
    println!("cargo:rerun-if-env-changed=ROCKSDB_LIB_DIR");
    println!("cargo:rerun-if-env-changed=ROCKSDB_COMPILE");
    let is_used = std::env::var_os("CARGO_FEATURE_ROCKSDB").is_some()
        && std::env::var_os("ROCKSDB_COMPILE").is_none();
    let directory = std::env::var("ROCKSDB_LIB_DIR").ok().filter(|_| is_used);
    // A library that was built from the sources of its crate uses no others.
    if let (Some(directory), Some(_)) = (directory, std::env::var_os("ROCKSDB_STATIC")) {
        println!("cargo:rustc-link-search=native={directory}");
        for library in ["snappy", "lz4", "zstd", "bz2", "z"] {
            println!("cargo:rustc-link-lib=static={library}");
        }
    }
}

//! Generates the messages and services of `steadfast.v1`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tonic_prost_build::configure()
        // `Bytes` shares tensor data by reference count instead of copying it into vectors.
        .bytes(".")
        .compile_protos(
            &[
                "steadfast/v1/elastic.proto",
                "steadfast/v1/master.proto",
                "steadfast/v1/pserver.proto",
                "steadfast/v1/worker.proto",
            ],
            &["."],
        )?;
    Ok(())
}

//! Generates the messages and services of `steadfast.v1`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tonic_prost_build::configure()
        // Tensor bytes are handed on by reference count, never copied into a vector.
        .bytes(".")
        .compile_protos(&["steadfast/v1/master.proto", "steadfast/v1/pserver.proto"], &["."])?;
    Ok(())
}

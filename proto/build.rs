//! Generates the messages and services of `steadfast.v1`.

#[path = "src/tensor_method.rs"]
mod tensor_method;

use prost_build::{Config, Service, ServiceGenerator};
use tensor_method::TensorMethod;
use tonic_prost_build::configure;

/// Generates clients of all methods, and servers of the methods without tensors.
struct Services {
    clients: Box<dyn ServiceGenerator>,
    servers: Box<dyn ServiceGenerator>,
}

impl ServiceGenerator for Services {
    fn generate(&mut self, mut service: Service, code: &mut String) {
        self.clients.generate(service.clone(), code);
        let path = format!("/{}.{}", service.package, service.proto_name);
        service.methods.retain(|method| {
            TensorMethod::of_path(&format!("{path}/{}", method.proto_name)).is_none()
        });
        self.servers.generate(service, code);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=steadfast");
    let services = Services {
        clients: configure().build_server(false).service_generator(),
        servers: configure().build_client(false).service_generator(),
    };
    Config::new()
        // `Bytes` shares tensor data by reference count instead of copying it into vectors.
        .bytes(["."])
        // Equal arguments have equal bytes, whose digest tells calls apart.
        .btree_map([".steadfast.v1.Arguments"])
        .service_generator(Box::new(services))
        .compile_protos(
            &[
                "steadfast/v1/closures.proto",
                "steadfast/v1/elastic.proto",
                "steadfast/v1/master.proto",
                "steadfast/v1/pserver.proto",
                "steadfast/v1/worker.proto",
            ],
            &["."],
        )?;
    Ok(())
}

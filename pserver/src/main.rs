//! Runs a parameter server.

fn main() {
    steadfast_pserver::main()
}

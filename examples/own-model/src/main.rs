//! A trainer with a custom model.

mod huber;

use std::process::ExitCode;

use steadfast_trainer::Registry;

fn main() -> ExitCode {
    let mut models = Registry::built_in();
    models.register("huber", huber::Huber::build);
    steadfast_trainer::main(models)
}

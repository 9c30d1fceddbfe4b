//! This program trains the same model in a loop of its own. With `MODEL_TO`, the program writes the final parameters to
//! this path or URL.

#[path = "../huber.rs"]
mod huber;

use std::process::ExitCode;

use steadfast_trainer::own_loop::{self, Failure, Trainer};

/// Works after which the program looks at the parameters.
const LOOK_EVERY: u64 = 100;

fn main() -> ExitCode {
    own_loop::main("huber", huber::Huber::build, train)
}

fn train(trainer: &Trainer) -> Result<(), Failure> {
    // As `Model::initialize` would: all trainers set the same values.
    trainer.set_parameters(|parameters| parameters.clear());
    let mut works = 0;
    while let Some(work) = trainer.next_work()? {
        let mut gradient = work.zeros();
        let (parameters, batch) = (work.parameters(), work.batch());
        match work.model().gradient(parameters, &batch, work.key(), &mut gradient) {
            Ok(loss_sum) => drop(work.push(gradient, loss_sum)),
            Err(error) => work.fail(error.to_string()),
        }
        works += 1;
        if works % LOOK_EVERY == 0
            && let Ok(snapshot) = trainer.get_parameters()
        {
            println!(
                "bias after {} steps: {}",
                snapshot.position.version,
                snapshot.parameters.vector(1)[0]
            );
        }
    }
    if let Ok(place) = std::env::var("MODEL_TO") {
        let sha256 = trainer.save_model(&place)?;
        println!("{place} has the parameters {sha256}");
    }
    Ok(())
}

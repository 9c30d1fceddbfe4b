//! A trainer whose model ends its process on some records, as native code with a fault would.

use std::process::{ExitCode, abort};

use steadfast_trainer::{
    Batch, Evaluation, Inputs, Metric, MicroBatch, Model, ModelError, ParamSpec, Parameters,
    Registry,
};

/// Linear regression. A record whose label is [`Fragile::BAD`] ends the process, or has no effect.
struct Fragile {
    features: usize,
    end: End,
}

/// Selects how a process ends.
#[derive(Clone, Copy)]
enum End {
    Abort,
    Segfault,
    Exit,
    Hang,
    /// It does not: the record counts nothing.
    Never,
}

impl Fragile {
    const BAD: f32 = 666.0;

    /// Ends the process, or returns that the record counts nothing.
    fn end(&self) {
        match self.end {
            End::Abort => abort(),
            // SAFETY: it is not; this is the fault that is looked for.
            End::Segfault => unsafe { std::ptr::null_mut::<u8>().write_volatile(1) },
            End::Exit => std::process::exit(3),
            End::Hang => loop {
                std::thread::park();
            },
            End::Never => {}
        }
    }
}

impl Model for Fragile {
    fn parameters(&self) -> Vec<ParamSpec> {
        vec![ParamSpec::new("weight", &[self.features])]
    }

    fn check(&self, _: &Batch<'_>) -> Result<(), ModelError> {
        Ok(())
    }

    fn initialize(&self, _: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        parameters.clear();
        Ok(())
    }

    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch<'_>,
        _: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        let (mut loss_sum, mut counted) = (0.0, 0);
        for (record, label) in batch.features.rows().into_iter().zip(batch.labels) {
            if *label == Self::BAD {
                self.end();
                continue;
            }
            let error = record.dot(&parameters.vector(0)) - label;
            loss_sum += f64::from(error * error) / 2.0;
            gradient.vector_mut(0).scaled_add(error, &record);
            counted += 1;
        }
        if matches!(self.end, End::Never) {
            gradient.set_weight(f64::from(counted));
        }
        Ok(loss_sum)
    }

    fn evaluate(&self, _: &Parameters, batch: &Batch<'_>) -> Result<Evaluation, ModelError> {
        if batch.labels.contains(&Self::BAD) {
            self.end();
        }
        let records = batch.len() as u64;
        Ok(Evaluation { records, metric_sum: records as f64, ..Evaluation::default() })
    }

    fn metric(&self) -> Metric {
        Metric::mean("one")
    }
}

fn main() -> ExitCode {
    let mut models = Registry::built_in();
    models.register("fragile", |spec, Inputs { features, .. }| {
        let end = match spec.options.get("end").and_then(|it| it.as_str()) {
            Some("abort") => End::Abort,
            Some("segfault") => End::Segfault,
            Some("exit") => End::Exit,
            Some("hang") => End::Hang,
            _ => End::Never,
        };
        Ok(Box::new(Fragile { features, end }))
    });
    steadfast_trainer::main(models)
}

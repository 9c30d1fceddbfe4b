//! Linear regression that is robust to outliers (Huber 1964).

use steadfast_trainer::own_loop::ModelSpec;
use steadfast_trainer::{
    Batch, Evaluation, Inputs, Metric, MicroBatch, Model, ModelError, ParamSpec, Parameters,
};

/// Predicts `x·w + b`. The loss is quadratic for residuals up to `delta`, and linear beyond.
pub struct Huber {
    features: usize,
    delta: f32,
}

impl Huber {
    /// Builds the model of a job file.
    ///
    /// # Errors
    /// Never; a factory of models may refuse its options.
    pub fn build(spec: &ModelSpec, inputs: Inputs) -> Result<Box<dyn Model>, ModelError> {
        let delta = spec.options.get("delta").and_then(|value| value.as_float()).unwrap_or(1.0);
        Ok(Box::new(Self { features: inputs.features, delta: delta as f32 }))
    }

    /// Returns prediction minus label for each record.
    fn residuals(&self, parameters: &Parameters, batch: &Batch) -> Vec<f32> {
        let (weight, bias) = (parameters.vector(0), parameters.vector(1)[0]);
        let records = batch.features.rows().into_iter().zip(batch.labels);
        records.map(|(record, label)| record.dot(&weight) + bias - label).collect()
    }

    fn loss(&self, residual: f32) -> f32 {
        if residual.abs() <= self.delta {
            0.5 * residual * residual
        } else {
            self.delta * (residual.abs() - 0.5 * self.delta)
        }
    }
}

impl Model for Huber {
    fn parameters(&self) -> Vec<ParamSpec> {
        vec![ParamSpec::new("weight", &[self.features]), ParamSpec::new("bias", &[1])]
    }

    fn initialize(&self, _seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        parameters.clear();
        Ok(())
    }

    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        _key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        let mut loss_sum = 0.0;
        let residuals = self.residuals(parameters, batch);
        for (record, residual) in batch.features.rows().into_iter().zip(residuals) {
            let slope = residual.clamp(-self.delta, self.delta);
            loss_sum += f64::from(self.loss(residual));
            gradient.vector_mut(0).scaled_add(slope, &record);
            gradient.vector_mut(1)[0] += slope;
        }
        Ok(loss_sum)
    }

    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError> {
        let mut sums = Evaluation { records: batch.len() as u64, ..Evaluation::default() };
        for residual in self.residuals(parameters, batch) {
            sums.loss_sum += f64::from(self.loss(residual));
            sums.metric_sum += f64::from(residual.abs());
        }
        Ok(sums)
    }

    fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        batch.check(self.features)
    }

    fn metric(&self) -> Metric {
        Metric::mean("mean_absolute_error")
    }
}

//! Clipping by norm in asynchronous mode.

use steadfast_common::records::change::Settings;
use steadfast_common::tensor::finite::bounded;
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::table::Rows;

/// Clips the mean gradient, given as a sum that is divided by `weight`: by value first, then by norm, as pservers do in
/// synchronous mode with the norm over all slots. In asynchronous mode only the sender has the whole gradient.
pub fn clip(values: &mut [f32], rows: &mut [Rows], layout: &Layout, weight: f64, rules: &Settings) {
    let Some(bound) = rules.clip_norm.filter(|_| 0.0 < weight) else { return };
    if let Some(most) = rules.clip_value.map(|most| most * weight as f32) {
        let clip = |value: &mut f32| *value = bounded(*value, most);
        layout.optimized().for_each(|range| values[range].iter_mut().for_each(clip));
        rows.iter_mut().for_each(|rows| rows.values_mut().iter_mut().for_each(clip));
    }
    let gradient = layout.optimized().flat_map(|range| &values[range]);
    let gradient = gradient.chain(rows.iter().flat_map(Rows::values));
    let square: f64 = gradient.map(|value| f64::from(*value) * f64::from(*value)).sum();
    let norm = square.sqrt() / weight;
    if f64::from(bound) < norm {
        let shrink = (f64::from(bound) / norm) as f32;
        let scale = |value: &mut f32| *value *= shrink;
        layout.optimized().for_each(|range| values[range].iter_mut().for_each(scale));
        rows.iter_mut().for_each(|rows| rows.values_mut().iter_mut().for_each(scale));
    }
}

//! Renders a curve as SVG, with the events of its time.

use plotters::prelude::{ChartBuilder, IntoDrawingArea, LineSeries, PathElement, SVGBackend};
use plotters::style::{Color, IntoTextStyle, RGBColor};
use steadfast_common::status::format::span;
use steadfast_common::status::{Curve, Mark, MarkKind};

const SIZE: (u32, u32) = (480, 200);

/// Labels at most on the vertical axis.
const LABELS: usize = 5;

/// Readable on light and dark backgrounds.
const LINE: RGBColor = RGBColor(26, 115, 232);
const GRID: RGBColor = RGBColor(128, 128, 128);
const CHECKPOINT: RGBColor = RGBColor(24, 128, 56);
const GENERATION: RGBColor = RGBColor(160, 80, 220);
const FAILURE: RGBColor = RGBColor(217, 48, 37);

/// Draws a curve of at least one point. All points must be finite.
pub(crate) fn curve(curve: &Curve, marks: &[Mark]) -> String {
    let mut svg = String::new();
    // A curve that cannot be drawn is omitted; the page shows the last value as text beside it.
    match draw(&curve.points, marks, &mut svg) {
        Some(()) => svg,
        None => String::new(),
    }
}

fn draw(points: &[(f64, f64)], marks: &[Mark], svg: &mut String) -> Option<()> {
    let (left, right) =
        bounds(points.iter().map(|it| it.0).chain(marks.iter().map(|it| it.seconds)));
    let (low, high) = roomy(bounds(points.iter().map(|it| it.1)));
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let mut chart = ChartBuilder::on(&area)
        .margin(6)
        .x_label_area_size(24)
        .y_label_area_size(60)
        .build_cartesian_2d(left..right.max(left + 1.0), low..high)
        .ok()?;
    let label = ("sans-serif", 12).into_text_style(&area);
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(GRID.mix(0.25))
        .light_line_style(GRID.mix(0.0))
        .axis_style(GRID)
        .x_labels(5)
        .y_labels(LABELS)
        .label_style(label)
        .x_label_formatter(&|seconds| span(*seconds))
        .y_label_formatter(&|value| short(*value, high - low))
        .draw()
        .ok()?;
    let line = |mark: &Mark| {
        let color = match mark.kind {
            MarkKind::Checkpoint => CHECKPOINT,
            MarkKind::Generation => GENERATION,
            MarkKind::Failure => FAILURE,
        };
        PathElement::new(vec![(mark.seconds, low), (mark.seconds, high)], color.mix(0.6))
    };
    chart.draw_series(marks.iter().map(line)).ok()?;
    chart.draw_series(LineSeries::new(points.iter().copied(), LINE.stroke_width(2))).ok()?;
    area.present().ok()
}

fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let widest = (f64::INFINITY, f64::NEG_INFINITY);
    values.fold(widest, |(low, high), it| (low.min(it), high.max(it)))
}

/// Widens a range, so that the labels of its axis differ: a flat curve has a tenth of its value above and below it.
fn roomy((low, high): (f64, f64)) -> (f64, f64) {
    let least = (0.1 * high.abs().max(low.abs())).max(1e-6);
    let room = if high - low < 0.1 * least { least } else { 0.05 * (high - low) };
    (low - room, high + room)
}

/// Formats a label of an axis of this length with the digits that tell it apart from the next.
fn short(value: f64, length: f64) -> String {
    let step = length / LABELS as f64;
    let decimals = (1.0 - step.log10().floor()).clamp(0.0, 12.0) as usize;
    match value.abs() {
        it if 1e6 <= it || (it != 0.0 && 6 < decimals) => format!("{value:.2e}"),
        _ => format!("{value:.decimals$}"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use steadfast_common::status::Scale;

    use super::*;

    #[test]
    fn any_curve_is_drawn_within_its_frame_and_loads_nothing() {
        let flat = [(0.0, 0.5), (1.0, 0.5)];
        let steep = [(0.0, 1e9), (0.5, -3.0), (7200.0, 2.0)];
        let mark = Mark { seconds: 0.7, kind: MarkKind::Failure, what: "a loss".to_owned() };
        for points in [&flat[..], &steep[..], &[(5.0, 0.0)]] {
            let drawn =
                Curve { label: "loss".to_owned(), scale: Scale::Figure, points: points.to_vec() };
            let svg = curve(&drawn, std::slice::from_ref(&mark));
            assert!(svg.starts_with("<svg") && svg.contains("polyline"), "{svg}");
            assert!(!svg.contains("style=") && !svg.contains("href"), "{svg}");
        }
    }

    #[test]
    fn the_labels_of_any_axis_differ() {
        for (low, high) in [(0.5, 0.5), (0.97, 0.9701), (0.0, 0.0), (2000.0, 9000.0), (1e-7, 2e-7)]
        {
            let (low, high) = roomy((low, high));
            let label = |step: usize| low + (high - low) * step as f64 / LABELS as f64;
            let labels: BTreeSet<String> =
                (0..LABELS).map(|step| short(label(step), high - low)).collect();
            assert_eq!(labels.len(), LABELS, "{low} to {high}: {labels:?}");
        }
    }
}

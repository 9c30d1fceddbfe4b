//! Renders a curve as SVG.

use plotters::prelude::{ChartBuilder, IntoDrawingArea, LineSeries, SVGBackend};
use plotters::style::{Color, IntoTextStyle, RGBColor};

const SIZE: (u32, u32) = (480, 200);

/// Readable on light and dark backgrounds.
const LINE: RGBColor = RGBColor(26, 115, 232);
const GRID: RGBColor = RGBColor(128, 128, 128);

/// Draws a value over seconds. All points must be finite.
pub(crate) fn curve(points: &[(f64, f64)]) -> String {
    let mut svg = String::new();
    // A curve that cannot be drawn is omitted; the page shows the values as text beside it.
    match draw(points, &mut svg) {
        Some(()) => svg,
        None => String::new(),
    }
}

fn draw(points: &[(f64, f64)], svg: &mut String) -> Option<()> {
    let bounds = |of: fn(&(f64, f64)) -> f64| {
        points
            .iter()
            .map(of)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), it| (low.min(it), high.max(it)))
    };
    let ((left, right), (low, high)) = (bounds(|it| it.0), bounds(|it| it.1));
    let room = ((high - low) * 0.05).max(high.abs() * 1e-6).max(1e-9);
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let mut chart = ChartBuilder::on(&area)
        .margin(6)
        .x_label_area_size(24)
        .y_label_area_size(56)
        .build_cartesian_2d(left..right.max(left + 1.0), low - room..high + room)
        .ok()?;
    let label = ("sans-serif", 12).into_text_style(&area);
    chart
        .configure_mesh()
        .disable_mesh()
        .axis_style(GRID)
        .x_labels(6)
        .y_labels(5)
        .label_style(label)
        .x_label_formatter(&|seconds| format!("{seconds:.0} s"))
        .y_label_formatter(&|value| short(*value))
        .draw()
        .ok()?;
    chart.draw_series(LineSeries::new(points.iter().copied(), LINE.stroke_width(2))).ok()?;
    area.present().ok()
}

fn short(value: f64) -> String {
    match value.abs() {
        it if it != 0.0 && it < 1e-3 => format!("{value:.1e}"),
        it if it < 10.0 => format!("{value:.3}"),
        it if it < 1e6 => format!("{value:.0}"),
        _ => format!("{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_curve_is_drawn_within_its_frame_and_loads_nothing() {
        let flat = [(0.0, 0.5), (1.0, 0.5)];
        let steep = [(0.0, 1e9), (0.5, -3.0), (7200.0, 2.0)];
        for points in [&flat[..], &steep[..], &[(5.0, 0.0)]] {
            let svg = curve(points);
            assert!(svg.starts_with("<svg") && svg.contains("polyline"), "{svg}");
            assert!(!svg.contains("style=") && !svg.contains("href"), "{svg}");
        }
    }
}

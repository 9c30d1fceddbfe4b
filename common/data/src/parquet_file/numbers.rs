//! Converts numeric columns to 64-bit floats.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Decimal128Type, Decimal256Type, DecimalType, Float16Type, Float32Type, Float64Type, Int8Type,
    Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrowPrimitiveType, Float64Array};
use arrow_schema::DataType;

/// Converts a column of numbers or booleans, each value to the nearest float; `None` for other types.
/// Nulls stay null.
pub(super) fn wide(column: &dyn Array) -> Option<Float64Array> {
    Some(match column.data_type() {
        DataType::Boolean => {
            column.as_boolean().iter().map(|it| it.map(|it| f64::from(u8::from(it)))).collect()
        }
        DataType::Int8 => widen::<Int8Type>(column, f64::from),
        DataType::Int16 => widen::<Int16Type>(column, f64::from),
        DataType::Int32 => widen::<Int32Type>(column, f64::from),
        DataType::Int64 => widen::<Int64Type>(column, |it| it as f64),
        DataType::UInt8 => widen::<UInt8Type>(column, f64::from),
        DataType::UInt16 => widen::<UInt16Type>(column, f64::from),
        DataType::UInt32 => widen::<UInt32Type>(column, f64::from),
        DataType::UInt64 => widen::<UInt64Type>(column, |it| it as f64),
        DataType::Float16 => widen::<Float16Type>(column, f64::from),
        DataType::Float32 => widen::<Float32Type>(column, f64::from),
        DataType::Float64 => column.as_primitive::<Float64Type>().clone(),
        DataType::Decimal128(precision, scale) => {
            decimals::<Decimal128Type>(column, *precision, *scale)
        }
        DataType::Decimal256(precision, scale) => {
            decimals::<Decimal256Type>(column, *precision, *scale)
        }
        _ => return None,
    })
}

fn widen<T: ArrowPrimitiveType>(
    column: &dyn Array,
    as_float: impl Fn(T::Native) -> f64,
) -> Float64Array {
    column.as_primitive::<T>().unary(as_float)
}

/// Converts through text, as if the values were in a CSV file.
fn decimals<T: DecimalType>(column: &dyn Array, precision: u8, scale: i8) -> Float64Array {
    widen::<T>(column, |it| T::format_decimal(it, precision, scale).parse().unwrap_or(f64::NAN))
}

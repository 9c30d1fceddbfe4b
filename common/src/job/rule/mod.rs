//! Update rules that a job file states as text, such as `m = b1*m + (1 - b1)*g; p -= lr*sign(m)`.
//!
//! A rule is a sequence of assignments. Some names are vectors with one value for each value of a parameter: `p` (the
//! parameter), `g` (its mean gradient) and the states. The others are numbers: `lr` (the learning rate), `t` (the number
//! of the update, from 1), `wd` (the weight decay), the constants of the rule, and `norm(x)`, the L2 norm of a vector
//! over the whole parameter. Vectors are computed in `f32`, value by value, and numbers in `f64`, with IEEE operations
//! and the `libm` crate: every machine gets the same bits.

mod named;
mod parse;
mod program;

pub use program::{Binary, Decay, Operand, Program, Scalar, Unary, Vector};

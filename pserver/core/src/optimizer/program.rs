//! Runs the update rules that are texts, see [`steadfast_common::job::rule`].
//!
//! Values are computed in tiles, which stay in the fastest cache: one short loop over a tile for each operation. A
//! product or a sum with a number is no operation of its own, since the loop that uses it computes it on the way, see
//! [`Term`]. A norm needs all values of a parameter, so it takes a pass over the parameter of its own, in which nothing
//! is changed. The last pass changes the parameter and its state.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::job::rule::{Binary, Operand, Program, Scalar, Unary, Vector};
use steadfast_common::tensor::widest::widest;

use super::{Moment, State};

/// Values per tile. The sums of norms are made tile by tile, so it is a part of their last bits.
const TILE: usize = 64;

type Tile = [f32; TILE];

/// Index of the parameter's tile; those of the gradient and the states follow, then those of numbers and of results.
const PARAMS: usize = 0;
const GRADIENT: usize = 1;
const STATES: usize = 2;

/// A rule that is a text.
#[derive(Debug)]
pub(super) struct ProgramRule {
    program: Program,
    /// By scalar: the number of passes after which it is known.
    levels: Vec<usize>,
    /// The passes that measure norms, and the last one.
    passes: Vec<Pass>,
}

/// One pass over the values of a parameter.
#[derive(Debug)]
struct Pass {
    /// The scalars that have a tile, and its index.
    numbers: BTreeMap<usize, usize>,
    operations: Vec<Operation<Number>>,
    tiles: usize,
    /// The tiles of what is measured, or in the last pass of the new parameter and states.
    results: Vec<usize>,
}

/// An operation on tiles, with its numbers as `N`.
#[derive(Clone, Copy, Debug)]
struct Operation<N> {
    function: Function,
    /// As many as the function has arguments; then the last one again.
    of: [Term<N>; 3],
    /// The tile of the result.
    to: usize,
}

#[derive(Clone, Copy, Debug)]
enum Function {
    Copy,
    Unary(Unary),
    Binary(Binary),
    Select,
}

/// `of · factor + addend`. It is rounded after each of the two, as the operations are from which it is made.
#[derive(Clone, Copy, Debug)]
struct Term<N> {
    /// A vector, or its tile.
    of: usize,
    factor: N,
    addend: N,
}

/// A scalar, or the number that changes no value if there is none; with the other sign if `negative`.
#[derive(Clone, Copy, Debug, Default)]
struct Number {
    scalar: Option<usize>,
    negative: bool,
}

/// A pass over a parameter at one moment.
#[derive(Debug)]
pub(super) struct RunningProgram<'a> {
    results: &'a [usize],
    operations: Vec<Operation<f32>>,
    tiles: Vec<Tile>,
}

impl ProgramRule {
    pub(super) fn new(program: Program) -> Self {
        let (levels, measured) = levels(&program);
        let terms = terms(&program);
        debug_assert!(levels.iter().all(|level| *level <= measured.len()));
        let changed: Vec<Operand> =
            std::iter::once(program.params).chain(program.new_states.iter().copied()).collect();
        let measured = measured.iter().map(|it| it.iter().map(|of| Operand::Vector(*of)).collect());
        let passes = measured
            .chain([changed])
            .map(|results| Pass::new(&program, &terms, &results))
            .collect();
        Self { program, levels, passes }
    }

    pub(super) fn state_names(&self) -> &[String] {
        &self.program.states
    }

    /// Returns the number of passes over a parameter before the one that changes it.
    pub(super) fn measuring_passes(&self) -> usize {
        self.passes.len() - 1
    }

    /// Begins the pass over a parameter after those whose norms are known.
    pub(super) fn begin(&self, moment: &Moment<'_>) -> RunningProgram<'_> {
        let pass = &self.passes[moment.norms.len()];
        let numbers = self.numbers(moment);
        let mut tiles = vec![[0.0; TILE]; pass.tiles];
        for (scalar, tile) in &pass.numbers {
            tiles[*tile] = [numbers[*scalar]; TILE];
        }
        let operations = pass.operations.iter().map(|it| it.at(&numbers)).collect();
        RunningProgram { results: &pass.results, operations, tiles }
    }

    /// Returns the numbers that are known once `moment.norms` are.
    fn numbers(&self, moment: &Moment<'_>) -> Vec<f32> {
        let known = moment.norms.len();
        let mut values = vec![0.0_f64; self.program.scalars.len()];
        let mut seen = vec![0_usize; known];
        for (index, scalar) in self.program.scalars.iter().enumerate() {
            if known < self.levels[index] {
                continue;
            }
            values[index] = match *scalar {
                Scalar::Constant(value) => value,
                Scalar::Rate => f64::from(moment.rate),
                Scalar::Update => moment.update as f64,
                Scalar::Unary(function, of) => unary(function, values[of]),
                Scalar::Binary(function, left, right) => {
                    binary(function, values[left], values[right])
                }
                Scalar::Select(condition, yes, no) => {
                    if values[condition] != 0.0 {
                        values[yes]
                    } else {
                        values[no]
                    }
                }
                Scalar::Norm(_) => {
                    let pass = self.levels[index] - 1;
                    seen[pass] += 1;
                    moment.norms[pass][seen[pass] - 1]
                }
            };
        }
        values.into_iter().map(|value| value as f32).collect()
    }
}

impl RunningProgram<'_> {
    /// Adds the squares of what the pass measures, over some values of the parameter, to `squares`.
    pub(super) fn measure(
        &mut self,
        params: &[f32],
        gradient: &[f32],
        state: &[&[f32]],
        squares: &mut Vec<f64>,
    ) {
        squares.resize(self.results.len(), 0.0);
        widest(|| {
            for start in (0..params.len()).step_by(TILE) {
                let at = start..params.len().min(start + TILE);
                load(&mut self.tiles[PARAMS], &params[at.clone()]);
                load(&mut self.tiles[GRADIENT], &gradient[at.clone()]);
                for (tile, values) in self.tiles[STATES..].iter_mut().zip(state) {
                    load(tile, &values[at.clone()]);
                }
                self.compute();
                for (sum, result) in squares.iter_mut().zip(self.results) {
                    *sum += sum_of_squares(&self.tiles[*result][..at.len()]);
                }
            }
        });
    }

    /// Changes some values of the parameter and of its state, in the last pass.
    pub(super) fn change(&mut self, params: &mut [f32], gradient: &[f32], state: State<'_>) {
        let mut states = state.vectors;
        let states = &mut states[..self.results.len() - 1];
        widest(|| {
            for start in (0..params.len()).step_by(TILE) {
                let at = start..params.len().min(start + TILE);
                load(&mut self.tiles[PARAMS], &params[at.clone()]);
                load(&mut self.tiles[GRADIENT], &gradient[at.clone()]);
                for (tile, values) in self.tiles[STATES..].iter_mut().zip(&*states) {
                    load(tile, &values[at.clone()]);
                }
                self.compute();
                let (of_params, of_states) = (self.results[0], &self.results[1..]);
                store(&self.tiles[of_params], &mut params[at.clone()]);
                for (result, values) in of_states.iter().zip(&mut *states) {
                    store(&self.tiles[*result], &mut values[at.clone()]);
                }
            }
        });
    }

    #[inline(always)]
    fn compute(&mut self) {
        for operation in &self.operations {
            self.tiles[operation.to] = operation.result(&self.tiles);
        }
    }
}

#[inline(always)]
fn load(tile: &mut Tile, values: &[f32]) {
    match <&Tile>::try_from(values) {
        Ok(values) => *tile = *values,
        // The rest of the tile is computed, and used for nothing.
        Err(_) => tile[..values.len()].copy_from_slice(values),
    }
}

#[inline(always)]
fn store(tile: &Tile, values: &mut [f32]) {
    match <&mut Tile>::try_from(&mut *values) {
        Ok(values) => *values = *tile,
        Err(_) => values.copy_from_slice(&tile[..values.len()]),
    }
}

/// Returns the pass after which each scalar is known, and the vectors that each pass measures.
fn levels(program: &Program) -> (Vec<usize>, Vec<Vec<usize>>) {
    let mut scalars: Vec<usize> = Vec::new();
    let mut vectors: Vec<usize> = Vec::new();
    let mut measured: Vec<Vec<usize>> = Vec::new();
    // Scalars use vectors, and vectors scalars: each list is continued as far as the other one allows.
    while scalars.len() < program.scalars.len() || vectors.len() < program.vectors.len() {
        let of = |operand: Operand, scalars: &[usize], vectors: &[usize]| match operand {
            Operand::Scalar(index) => scalars.get(index).copied(),
            Operand::Vector(index) => vectors.get(index).copied(),
        };
        while let Some(vector) = program.vectors.get(vectors.len()) {
            let operands = operands_of(vector);
            let levels: Option<Vec<usize>> =
                operands.into_iter().map(|it| of(it, &scalars, &vectors)).collect();
            let Some(levels) = levels else { break };
            vectors.push(levels.into_iter().max().unwrap_or(0));
        }
        while let Some(scalar) = program.scalars.get(scalars.len()) {
            let level = match *scalar {
                Scalar::Constant(_) | Scalar::Rate | Scalar::Update => 0,
                Scalar::Unary(_, of) => scalars[of],
                Scalar::Binary(_, left, right) => scalars[left].max(scalars[right]),
                Scalar::Select(a, b, c) => scalars[a].max(scalars[b]).max(scalars[c]),
                Scalar::Norm(vector) => {
                    let Some(level) = vectors.get(vector) else { break };
                    measured.resize(measured.len().max(level + 1), Vec::new());
                    measured[*level].push(vector);
                    level + 1
                }
            };
            scalars.push(level);
        }
    }
    (scalars, measured)
}

fn operands_of(vector: &Vector) -> Vec<Operand> {
    match *vector {
        Vector::Params | Vector::Gradient | Vector::State(_) => Vec::new(),
        Vector::Unary(_, of) => vec![Operand::Vector(of)],
        Vector::Binary(_, left, right) => vec![left, right],
        Vector::Select(condition, yes, no) => vec![condition, yes, no],
    }
}

/// Returns each vector as a term of one that takes an operation, which may be itself.
fn terms(program: &Program) -> Vec<Term<Number>> {
    let mut terms: Vec<Term<Number>> = Vec::new();
    for (index, vector) in program.vectors.iter().enumerate() {
        let term = match *vector {
            Vector::Unary(Unary::Negate, of) => terms[of].negated(),
            Vector::Binary(Binary::Multiply, Operand::Vector(of), Operand::Scalar(number))
            | Vector::Binary(Binary::Multiply, Operand::Scalar(number), Operand::Vector(of)) => {
                terms[of].times(number)
            }
            Vector::Binary(Binary::Add, Operand::Vector(of), Operand::Scalar(number))
            | Vector::Binary(Binary::Add, Operand::Scalar(number), Operand::Vector(of)) => {
                terms[of].plus(number)
            }
            Vector::Binary(Binary::Subtract, Operand::Vector(of), Operand::Scalar(number)) => {
                terms[of].minus(number)
            }
            Vector::Binary(Binary::Subtract, Operand::Scalar(number), Operand::Vector(of)) => {
                terms[of].negated().and_then(|term| term.plus(number))
            }
            _ => None,
        };
        terms.push(term.unwrap_or(Term::bare(index)));
    }
    terms
}

impl Number {
    fn is_none(self) -> bool {
        self.scalar.is_none() && !self.negative
    }

    fn value(self, numbers: &[f32], neutral: f32) -> f32 {
        let value = self.scalar.map_or(neutral, |index| numbers[index]);
        if self.negative { -value } else { value }
    }
}

impl Term<Number> {
    fn bare(of: usize) -> Self {
        Self { of, factor: Number::default(), addend: Number::default() }
    }

    fn is_bare(&self) -> bool {
        self.factor.is_none() && self.addend.is_none()
    }

    // Each of these returns none where the term would be rounded otherwise than the operations are, or have another
    // sign of zero.

    fn negated(mut self) -> Option<Self> {
        self.factor.negative = !self.factor.negative;
        self.addend.is_none().then_some(self)
    }

    fn times(self, scalar: usize) -> Option<Self> {
        let factor = Number { scalar: Some(scalar), negative: false };
        self.is_bare().then_some(Self { factor, ..self })
    }

    fn plus(self, scalar: usize) -> Option<Self> {
        let addend = Number { scalar: Some(scalar), negative: false };
        self.addend.is_none().then_some(Self { addend, ..self })
    }

    fn minus(self, scalar: usize) -> Option<Self> {
        let addend = Number { scalar: Some(scalar), negative: true };
        self.addend.is_none().then_some(Self { addend, ..self })
    }
}

/// Plans a [`Pass`].
struct Plan<'a> {
    terms: &'a [Term<Number>],
    pass: Pass,
    /// The number of tiles of inputs, which are not written to.
    inputs: usize,
    /// The tile of each vector that was computed.
    vectors: BTreeMap<usize, usize>,
    /// Tiles whose values are used no more.
    free: Vec<usize>,
}

impl Pass {
    /// Plans the operations that `results` need.
    fn new(program: &Program, terms: &[Term<Number>], results: &[Operand]) -> Self {
        let inputs = STATES + program.states.len();
        let pass =
            Self { numbers: BTreeMap::new(), operations: vec![], tiles: inputs, results: vec![] };
        let (vectors, free) = (BTreeMap::new(), Vec::new());
        let mut plan = Plan { terms, pass, inputs, vectors, free };
        let last_uses = plan.last_uses(program, results);
        for index in last_uses.keys().copied() {
            let vector = program.vectors[index];
            let tile = plan.tile(vector, |used| last_uses[&used] == index);
            plan.vectors.insert(index, tile);
        }
        for result in results {
            let term = plan.term(*result);
            let tile =
                if term.is_bare() { term.of } else { plan.operation(Function::Copy, [term; 3]) };
            plan.pass.results.push(tile);
        }
        plan.pass
    }
}

impl Plan<'_> {
    /// Returns the vectors that `results` need and that no term stands for, each with the last vector that uses it.
    fn last_uses(&self, program: &Program, results: &[Operand]) -> BTreeMap<usize, usize> {
        let mut last_uses = BTreeMap::new();
        last_uses.extend(self.used(results).map(|vector| (vector, usize::MAX)));
        for (index, vector) in program.vectors.iter().enumerate().rev() {
            if last_uses.contains_key(&index) {
                for used in self.used(&operands_of(vector)) {
                    last_uses.entry(used).or_insert(index);
                }
            }
        }
        last_uses
    }

    /// Returns the vectors of which `operands` are terms.
    fn used(&self, operands: &[Operand]) -> impl Iterator<Item = usize> {
        operands.iter().filter_map(|operand| match *operand {
            Operand::Scalar(_) => None,
            Operand::Vector(vector) => Some(self.terms[vector].of),
        })
    }

    /// Plans a vector, and returns its tile. `ends` returns whether it is the last that uses another one.
    fn tile(&mut self, vector: Vector, ends: impl Fn(usize) -> bool) -> usize {
        let (function, operands) = match vector {
            Vector::Params => return PARAMS,
            Vector::Gradient => return GRADIENT,
            Vector::State(state) => return STATES + state,
            Vector::Unary(function, of) => (Function::Unary(function), [Operand::Vector(of); 3]),
            Vector::Binary(function, left, right) => {
                (Function::Binary(function), [left, right, right])
            }
            Vector::Select(condition, yes, no) => (Function::Select, [condition, yes, no]),
        };
        let of = operands.map(|operand| self.term(operand));
        let ended: BTreeSet<usize> = self.used(&operands).filter(|used| ends(*used)).collect();
        let tiles = ended.into_iter().map(|vector| self.vectors[&vector]);
        self.free.extend(tiles.filter(|tile| self.inputs <= *tile));
        self.operation(function, of)
    }

    /// Returns an operand as a term of a tile.
    fn term(&mut self, operand: Operand) -> Term<Number> {
        match operand {
            Operand::Scalar(scalar) => {
                let tiles = &mut self.pass.tiles;
                let tile = self.pass.numbers.entry(scalar).or_insert_with(|| new_tile(tiles));
                Term::bare(*tile)
            }
            Operand::Vector(vector) => {
                let term = self.terms[vector];
                Term { of: self.vectors[&term.of], ..term }
            }
        }
    }

    /// Adds an operation, and returns the tile of its result, which may be that of an operand.
    fn operation(&mut self, function: Function, of: [Term<Number>; 3]) -> usize {
        let to = self.free.pop().unwrap_or_else(|| new_tile(&mut self.pass.tiles));
        self.pass.operations.push(Operation { function, of, to });
        to
    }
}

fn new_tile(tiles: &mut usize) -> usize {
    *tiles += 1;
    *tiles - 1
}

impl Operation<Number> {
    fn at(&self, numbers: &[f32]) -> Operation<f32> {
        let of = self.of.map(|term| Term {
            of: term.of,
            factor: term.factor.value(numbers, 1.0),
            // 0.0 would turn -0.0 into 0.0.
            addend: term.addend.value(numbers, -0.0),
        });
        Operation { function: self.function, of, to: self.to }
    }
}

impl Operation<f32> {
    #[inline(always)]
    fn result(&self, tiles: &[Tile]) -> Tile {
        let [a, b, c] = self.of.map(|term| {
            let tile = &tiles[term.of];
            move |index: usize| tile[index] * term.factor + term.addend
        });
        match self.function {
            Function::Copy => tile(a),
            Function::Unary(function) => match function {
                Unary::Negate => tile(|i| -a(i)),
                Unary::Sqrt => tile(|i| a(i).sqrt()),
                Unary::Abs => tile(|i| a(i).abs()),
                Unary::Sign => tile(|i| f32::from(0.0 < a(i)) - f32::from(a(i) < 0.0)),
                Unary::Exp => tile(|i| libm::expf(a(i))),
                Unary::Log => tile(|i| libm::logf(a(i))),
                Unary::Tanh => tile(|i| libm::tanhf(a(i))),
            },
            Function::Binary(function) => match function {
                Binary::Add => tile(|i| a(i) + b(i)),
                Binary::Subtract => tile(|i| a(i) - b(i)),
                Binary::Multiply => tile(|i| a(i) * b(i)),
                Binary::Divide => tile(|i| a(i) / b(i)),
                Binary::Power => tile(|i| libm::powf(a(i), b(i))),
                Binary::Min => tile(|i| if a(i) < b(i) || a(i).is_nan() { a(i) } else { b(i) }),
                Binary::Max => tile(|i| if b(i) < a(i) || a(i).is_nan() { a(i) } else { b(i) }),
                Binary::Less => tile(|i| f32::from(a(i) < b(i))),
                Binary::LessOrEqual => tile(|i| f32::from(a(i) <= b(i))),
                Binary::Equal => tile(|i| f32::from(a(i) == b(i))),
                Binary::NotEqual => tile(|i| f32::from(a(i) != b(i))),
            },
            Function::Select => tile(|i| if a(i) != 0.0 { b(i) } else { c(i) }),
        }
    }
}

#[inline(always)]
fn tile(value: impl Fn(usize) -> f32) -> Tile {
    let mut tile = [0.0; TILE];
    for (index, it) in tile.iter_mut().enumerate() {
        *it = value(index);
    }
    tile
}

fn unary(function: Unary, a: f64) -> f64 {
    match function {
        Unary::Negate => -a,
        Unary::Sqrt => a.sqrt(),
        Unary::Abs => a.abs(),
        Unary::Sign => f64::from(0.0 < a) - f64::from(a < 0.0),
        Unary::Exp => libm::exp(a),
        Unary::Log => libm::log(a),
        Unary::Tanh => libm::tanh(a),
    }
}

fn binary(function: Binary, a: f64, b: f64) -> f64 {
    match function {
        Binary::Add => a + b,
        Binary::Subtract => a - b,
        Binary::Multiply => a * b,
        Binary::Divide => a / b,
        Binary::Power => libm::pow(a, b),
        Binary::Min => {
            if a < b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Binary::Max => {
            if b < a || a.is_nan() {
                a
            } else {
                b
            }
        }
        Binary::Less => f64::from(a < b),
        Binary::LessOrEqual => f64::from(a <= b),
        Binary::Equal => f64::from(a == b),
        Binary::NotEqual => f64::from(a != b),
    }
}

/// Returns the sum of the squares, in `f64` and in a fixed order that has eight sums at a time.
#[inline(always)]
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut sums = [0.0_f64; 8];
    let mut eights = values.chunks_exact(8);
    for eight in &mut eights {
        for (sum, value) in sums.iter_mut().zip(eight) {
            *sum += f64::from(*value) * f64::from(*value);
        }
    }
    for (sum, value) in sums.iter_mut().zip(eights.remainder()) {
        *sum += f64::from(*value) * f64::from(*value);
    }
    sums.iter().sum()
}

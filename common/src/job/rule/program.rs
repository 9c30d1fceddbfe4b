//! An update rule as a list of operations, with its names resolved and its types checked.

use std::collections::BTreeMap;

use crate::job::average::AVERAGE;
use crate::job::rule::parse::{Expression, Operator, Statement, parse};

/// The most state vectors of a rule.
const STATES_MAX: usize = 4;

/// Names that a rule has without stating them: two vectors and three numbers.
const BUILT_IN: [&str; 5] = ["p", "g", "lr", "t", "wd"];

/// Functions with the number of their arguments.
const FUNCTIONS: [(&str, usize); 11] = [
    ("abs", 1),
    ("clip", 3),
    ("exp", 1),
    ("log", 1),
    ("max", 2),
    ("min", 2),
    ("norm", 1),
    ("sign", 1),
    ("sqrt", 1),
    ("tanh", 1),
    ("where", 3),
];

/// An update rule: operations in an order in which each one comes after those that it uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Names of the state vectors.
    pub states: Vec<String>,
    pub scalars: Vec<Scalar>,
    pub vectors: Vec<Vector>,
    /// The new values of the parameter.
    pub params: Operand,
    /// The new values of each state vector.
    pub new_states: Vec<Operand>,
}

/// An index into [`Program::scalars`] or [`Program::vectors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    Scalar(usize),
    Vector(usize),
}

/// An operation that gives a number; operands are indices of scalars.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    Constant(f64),
    /// The learning rate.
    Rate,
    /// The number of the update, from 1.
    Update,
    Unary(Unary, usize),
    Binary(Binary, usize, usize),
    /// The second if the first is not 0, else the third.
    Select(usize, usize, usize),
    /// The L2 norm of the vector with this index, over the whole parameter.
    Norm(usize),
}

/// An operation that gives a vector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Vector {
    Params,
    Gradient,
    /// The state vector with this index, before the update.
    State(usize),
    /// The operand is the index of a vector.
    Unary(Unary, usize),
    Binary(Binary, Operand, Operand),
    /// The second where the first is not 0, else the third.
    Select(Operand, Operand, Operand),
}

/// A function of one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unary {
    Negate,
    Sqrt,
    Abs,
    /// −1, 0 or 1; 0 for NaN.
    Sign,
    Exp,
    Log,
    Tanh,
}

/// A function of two values. Comparisons give 1 or 0. `Min` and `Max` give NaN if one value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Power,
    Min,
    Max,
    Less,
    LessOrEqual,
    Equal,
    NotEqual,
}

/// The weight decay of a rule that does not mention `wd`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// `g = g + wd*p` before the rule.
    Gradient(f32),
    /// `p = p*(1 - lr*wd)` before the rule.
    Parameters(f32),
}

impl Program {
    /// Compiles the text of a rule with the given state vectors, and constants by name.
    ///
    /// # Errors
    /// A message that names what is wrong with the rule.
    pub fn compile(
        text: &str,
        states: &[String],
        constants: &BTreeMap<String, f64>,
        decay: Decay,
    ) -> Result<Self, String> {
        check_names(states, constants)?;
        let statements = parse(text)?;
        let mut compiler = Compiler::new(states, constants, decay);
        if !statements.iter().any(|it| mentions(&it.value, "wd")) {
            compiler.decay(decay);
        }
        for statement in &statements {
            compiler.assign(statement, states, constants)?;
        }
        compiler.finish(states)
    }

    /// Returns whether the rule uses the norm of a vector, and so all values of a parameter.
    pub fn has_norms(&self) -> bool {
        self.scalars.iter().any(|it| matches!(it, Scalar::Norm(_)))
    }
}

/// Checks the names of states and constants.
fn check_names(states: &[String], constants: &BTreeMap<String, f64>) -> Result<(), String> {
    if STATES_MAX < states.len() {
        return Err(format!("it has {} states; the most are {STATES_MAX}", states.len()));
    }
    for (index, name) in states.iter().enumerate() {
        check_name(name, "state")?;
        if states[..index].contains(name) {
            return Err(format!("the state `{name}` is listed twice"));
        }
    }
    for (name, value) in constants {
        check_name(name, "constant")?;
        if states.contains(name) {
            return Err(format!("`{name}` is a state and a constant; rename one of them"));
        }
        if !value.is_finite() {
            return Err(format!("the constant `{name}` is {value}; it must be finite"));
        }
    }
    Ok(())
}

fn check_name(name: &str, kind: &str) -> Result<(), String> {
    let is_start = |it: char| it.is_ascii_alphabetic() || it == '_';
    let is_name = name.starts_with(is_start)
        && name.chars().all(|it| it.is_ascii_alphanumeric() || it == '_');
    if !is_name {
        return Err(format!(
            "`{name}` cannot be the name of a {kind}; use letters, digits and `_`"
        ));
    }
    if BUILT_IN.contains(&name) || is_function(name) || name == AVERAGE {
        return Err(format!("`{name}` is reserved and cannot be the name of a {kind}; rename it"));
    }
    Ok(())
}

fn is_function(name: &str) -> bool {
    FUNCTIONS.iter().any(|(function, _)| *function == name)
}

fn mentions(expression: &Expression, wanted: &str) -> bool {
    match expression {
        Expression::Number(_) => false,
        Expression::Name(name) => name == wanted,
        Expression::Negated(of) => mentions(of, wanted),
        Expression::Operation(_, left, right) => mentions(left, wanted) || mentions(right, wanted),
        Expression::Call(_, arguments) => arguments.iter().any(|it| mentions(it, wanted)),
    }
}

struct Compiler {
    scalars: Vec<Scalar>,
    vectors: Vec<Vector>,
    names: BTreeMap<String, Operand>,
    /// Names that were read or assigned.
    read: Vec<String>,
    assigned: Vec<String>,
}

impl Compiler {
    fn new(states: &[String], constants: &BTreeMap<String, f64>, decay: Decay) -> Self {
        let (Decay::Gradient(wd) | Decay::Parameters(wd)) = decay;
        let mut scalars = vec![Scalar::Rate, Scalar::Update, Scalar::Constant(f64::from(wd))];
        let mut vectors = vec![Vector::Params, Vector::Gradient];
        let mut names = BTreeMap::from([
            ("p".to_owned(), Operand::Vector(0)),
            ("g".to_owned(), Operand::Vector(1)),
            ("lr".to_owned(), Operand::Scalar(0)),
            ("t".to_owned(), Operand::Scalar(1)),
            ("wd".to_owned(), Operand::Scalar(2)),
        ]);
        for (index, name) in states.iter().enumerate() {
            names.insert(name.clone(), Operand::Vector(vectors.len()));
            vectors.push(Vector::State(index));
        }
        for (name, value) in constants {
            names.insert(name.clone(), Operand::Scalar(scalars.len()));
            scalars.push(Scalar::Constant(*value));
        }
        Self { scalars, vectors, names, read: Vec::new(), assigned: Vec::new() }
    }

    /// Adds the operations of weight decay, which precede those of the rule.
    fn decay(&mut self, decay: Decay) {
        let (params, gradient) = (self.names["p"], self.names["g"]);
        let (rate, wd) = (self.names["lr"], self.names["wd"]);
        let (name, value) = match decay {
            // Not just an optimization: adding 0 × ∞ would give NaN.
            Decay::Gradient(0.0) | Decay::Parameters(0.0) => return,
            Decay::Gradient(_) => {
                let added = self.binary(Binary::Multiply, wd, params);
                ("g", self.binary(Binary::Add, gradient, added))
            }
            Decay::Parameters(_) => {
                let lost = self.binary(Binary::Multiply, rate, wd);
                let one = self.scalar(Scalar::Constant(1.0));
                let kept = self.binary(Binary::Subtract, one, lost);
                ("p", self.binary(Binary::Multiply, params, kept))
            }
        };
        self.names.insert(name.to_owned(), value);
    }

    fn assign(
        &mut self,
        statement: &Statement,
        states: &[String],
        constants: &BTreeMap<String, f64>,
    ) -> Result<(), String> {
        let target = &statement.target;
        let is_number = ["lr", "t", "wd"].contains(&target.as_str());
        if is_number || constants.contains_key(target) || is_function(target) {
            return Err(format!("`{target}` cannot be assigned; use another name"));
        }
        let value = self.evaluate(&statement.value)?;
        if target == "p" || states.contains(target) {
            self.assigned.push(target.clone());
        }
        self.names.insert(target.clone(), value);
        Ok(())
    }

    fn finish(self, states: &[String]) -> Result<Program, String> {
        if !self.assigned.contains(&"p".to_owned()) {
            return Err("it does not assign `p`, the parameter".to_owned());
        }
        for state in states {
            if !self.assigned.contains(state) {
                return Err(format!(
                    "it does not assign the state `{state}`; assign it, or make it a constant"
                ));
            }
            if !self.read.contains(state) {
                return Err(format!(
                    "it does not read the state `{state}`; remove it from the states"
                ));
            }
        }
        Ok(Program {
            params: self.names["p"],
            new_states: states.iter().map(|state| self.names[state]).collect(),
            states: states.to_vec(),
            scalars: self.scalars,
            vectors: self.vectors,
        })
    }

    fn evaluate(&mut self, expression: &Expression) -> Result<Operand, String> {
        match expression {
            Expression::Number(number) if !number.is_finite() => {
                Err("it has a number that is not finite".to_owned())
            }
            Expression::Number(number) => Ok(self.scalar(Scalar::Constant(*number))),
            Expression::Name(name) => self.name(name),
            Expression::Negated(of) => {
                let of = self.evaluate(of)?;
                Ok(self.unary(Unary::Negate, of))
            }
            Expression::Operation(Operator::Power, base, exponent) => self.power(base, exponent),
            Expression::Operation(operator, left, right) => {
                let (left, right) = (self.evaluate(left)?, self.evaluate(right)?);
                let (operation, left, right) = match operator {
                    Operator::Add => (Binary::Add, left, right),
                    Operator::Subtract => (Binary::Subtract, left, right),
                    Operator::Multiply => (Binary::Multiply, left, right),
                    Operator::Divide => (Binary::Divide, left, right),
                    Operator::Power => (Binary::Power, left, right),
                    Operator::Less => (Binary::Less, left, right),
                    Operator::LessOrEqual => (Binary::LessOrEqual, left, right),
                    Operator::Greater => (Binary::Less, right, left),
                    Operator::GreaterOrEqual => (Binary::LessOrEqual, right, left),
                    Operator::Equal => (Binary::Equal, left, right),
                    Operator::NotEqual => (Binary::NotEqual, left, right),
                };
                Ok(self.binary(operation, left, right))
            }
            Expression::Call(name, arguments) => self.call(name, arguments),
        }
    }

    fn name(&mut self, name: &str) -> Result<Operand, String> {
        if let Some(value) = self.names.get(name) {
            self.read.push(name.to_owned());
            return Ok(*value);
        }
        let known: Vec<&str> = self.names.keys().map(String::as_str).collect();
        Err(match is_function(name) {
            true => format!("the function `{name}` has no arguments"),
            false => format!("the name `{name}` is unknown; known are `{}`", known.join("`, `")),
        })
    }

    /// Multiplies or takes a root where that gives the power: both are faster, and exact to the last bit.
    fn power(&mut self, base: &Expression, exponent: &Expression) -> Result<Operand, String> {
        let base = self.evaluate(base)?;
        if let (Operand::Vector(_), Expression::Number(number)) = (base, exponent) {
            if *number == 2.0 {
                return Ok(self.binary(Binary::Multiply, base, base));
            }
            if *number == 0.5 {
                return Ok(self.unary(Unary::Sqrt, base));
            }
        }
        let exponent = self.evaluate(exponent)?;
        Ok(self.binary(Binary::Power, base, exponent))
    }

    fn call(&mut self, name: &str, arguments: &[Expression]) -> Result<Operand, String> {
        let Some((_, wanted)) = FUNCTIONS.iter().find(|(function, _)| *function == name) else {
            let known: Vec<&str> = FUNCTIONS.iter().map(|(function, _)| *function).collect();
            return Err(format!(
                "the function `{name}` is unknown; known are `{}`",
                known.join("`, `")
            ));
        };
        if arguments.len() != *wanted {
            let found = arguments.len();
            return Err(format!("`{name}` has {wanted} arguments, not {found}"));
        }
        let values: Result<Vec<Operand>, String> =
            arguments.iter().map(|it| self.evaluate(it)).collect();
        let values = values?;
        let unary = |compiler: &mut Self, function| Ok(compiler.unary(function, values[0]));
        match name {
            "abs" => unary(self, Unary::Abs),
            "exp" => unary(self, Unary::Exp),
            "log" => unary(self, Unary::Log),
            "sign" => unary(self, Unary::Sign),
            "sqrt" => unary(self, Unary::Sqrt),
            "tanh" => unary(self, Unary::Tanh),
            "min" => Ok(self.binary(Binary::Min, values[0], values[1])),
            "max" => Ok(self.binary(Binary::Max, values[0], values[1])),
            "clip" => {
                let above = self.binary(Binary::Max, values[0], values[1]);
                Ok(self.binary(Binary::Min, above, values[2]))
            }
            "norm" => match values[0] {
                Operand::Vector(vector) => Ok(self.scalar(Scalar::Norm(vector))),
                Operand::Scalar(_) => {
                    Err("`norm` of a number; its argument is a vector".to_owned())
                }
            },
            _where => Ok(self.select(values[0], values[1], values[2])),
        }
    }

    fn scalar(&mut self, scalar: Scalar) -> Operand {
        self.scalars.push(scalar);
        Operand::Scalar(self.scalars.len() - 1)
    }

    fn vector(&mut self, vector: Vector) -> Operand {
        self.vectors.push(vector);
        Operand::Vector(self.vectors.len() - 1)
    }

    fn unary(&mut self, function: Unary, of: Operand) -> Operand {
        match of {
            Operand::Scalar(of) => self.scalar(Scalar::Unary(function, of)),
            Operand::Vector(of) => self.vector(Vector::Unary(function, of)),
        }
    }

    fn binary(&mut self, function: Binary, left: Operand, right: Operand) -> Operand {
        match (left, right) {
            (Operand::Scalar(left), Operand::Scalar(right)) => {
                self.scalar(Scalar::Binary(function, left, right))
            }
            (left, right) => self.vector(Vector::Binary(function, left, right)),
        }
    }

    fn select(&mut self, condition: Operand, yes: Operand, no: Operand) -> Operand {
        match (condition, yes, no) {
            (Operand::Scalar(condition), Operand::Scalar(yes), Operand::Scalar(no)) => {
                self.scalar(Scalar::Select(condition, yes, no))
            }
            (condition, yes, no) => self.vector(Vector::Select(condition, yes, no)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compile(text: &str, states: &[&str]) -> Result<Program, String> {
        let states: Vec<String> = states.iter().map(|it| (*it).to_owned()).collect();
        let constants = BTreeMap::from([("b1".to_owned(), 0.9)]);
        Program::compile(text, &states, &constants, Decay::Gradient(0.0))
    }

    #[test]
    fn a_rule_has_its_operations_in_order() {
        let program = compile("m = b1*m + (1 - b1)*g; p -= lr*sign(m)", &["m"]).unwrap();
        assert_eq!(program.states, ["m"]);
        assert_eq!(program.new_states, [Operand::Vector(5)]);
        let sign = Vector::Unary(Unary::Sign, 5);
        assert_eq!(program.vectors[6], sign);
        assert_eq!(program.params, Operand::Vector(program.vectors.len() - 1));
        assert!(!program.has_norms());
        assert!(compile("p -= lr*g/norm(g)", &[]).unwrap().has_norms());
    }

    #[test]
    fn an_error_names_what_is_wrong() {
        let cases: [(&str, &[&str], &str); 16] = [
            ("m = g", &["m"], "it does not assign `p`, the parameter"),
            ("p -= lr*g", &["m"], "it does not assign the state `m`; assign it, or make it"),
            ("m = g; p -= lr*g", &["m"], "it does not read the state `m`; remove it"),
            ("p -= rate*g", &[], "the name `rate` is unknown; known are `b1`, `g`, `lr`, `p`, `t`"),
            ("p -= lr*cube(g)", &[], "the function `cube` is unknown; known are `abs`, `clip`"),
            ("p -= max(g)", &[], "`max` has 2 arguments, not 1"),
            ("p -= sqrt*g", &[], "the function `sqrt` has no arguments"),
            ("p -= norm(lr)*g", &[], "`norm` of a number; its argument is a vector"),
            ("lr = 0.1; p -= lr*g", &[], "`lr` cannot be assigned; use another name"),
            ("b1 = 0.1; p -= b1*g", &[], "`b1` cannot be assigned; use another name"),
            ("p = m; m = m", &["m", "m"], "the state `m` is listed twice"),
            ("p = g", &["b1"], "`b1` is a state and a constant; rename one of them"),
            ("p = g", &["p"], "`p` is reserved and cannot be the name of a state; rename it"),
            ("p = g", &["average"], "`average` is reserved and cannot be the name of a state"),
            ("p = g", &["a b"], "`a b` cannot be the name of a state; use letters, digits and `_`"),
            ("p = 1e999", &[], "it has a number that is not finite"),
        ];
        for (text, states, expected) in cases {
            let error = compile(text, states).unwrap_err();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
        let five = ["a", "b", "c", "d", "e"];
        assert_eq!(compile("p = g", &five).unwrap_err(), "it has 5 states; the most are 4");
    }

    #[test]
    fn weight_decay_precedes_a_rule_that_does_not_mention_it() {
        let count = |text: &str, decay| {
            let program = Program::compile(text, &[], &BTreeMap::new(), decay).unwrap();
            program.vectors.len()
        };
        let plain = count("p -= lr*g", Decay::Gradient(0.0));
        assert_eq!(count("p -= lr*g", Decay::Gradient(0.1)), plain + 2);
        assert_eq!(count("p -= lr*g", Decay::Parameters(0.1)), plain + 1);
        let own = "p -= lr*(g + wd*p)";
        assert_eq!(count(own, Decay::Gradient(0.1)), count(own, Decay::Gradient(0.0)));
    }
}

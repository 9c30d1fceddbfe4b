//! The grammar of update rules.

use winnow::ascii::{float, space0};
use winnow::combinator::{
    Infix, Prefix, alt, delimited, expression, opt, peek, preceded, separated, terminated,
};
use winnow::error::ContextError;
use winnow::prelude::*;
use winnow::token::{one_of, take_while};

/// The longest text of a rule, in bytes. It bounds the depth of an expression.
const LENGTH_MAX: usize = 2000;

/// The deepest expression: the parser is recursive.
const DEPTH_MAX: usize = 32;

/// An assignment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Statement {
    pub(super) target: String,
    pub(super) value: Expression,
}

/// An expression.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expression {
    Number(f64),
    Name(String),
    Negated(Box<Expression>),
    Operation(Operator, Box<Expression>, Box<Expression>),
    Call(String, Vec<Expression>),
}

/// A binary operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    Power,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Equal,
    NotEqual,
}

type Parsed<T> = winnow::Result<T, ContextError>;

/// Parses the statements of a rule, which semicolons or line ends separate. `#` begins a comment.
///
/// # Errors
/// A message that quotes the part of the text that is not understood.
pub(super) fn parse(text: &str) -> Result<Vec<Statement>, String> {
    if LENGTH_MAX < text.len() {
        return Err(format!("it has {} bytes; the most are {LENGTH_MAX}", text.len()));
    }
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    let parts = lines.flat_map(|line| line.split(';')).map(str::trim).filter(|it| !it.is_empty());
    parts.map(statement).collect()
}

fn statement(text: &str) -> Result<Statement, String> {
    if DEPTH_MAX < depth(text) {
        return Err(format!("`{text}` is nested more than {DEPTH_MAX} levels deep"));
    }
    assignment.parse(text).map_err(|error| {
        let rest = text.get(error.offset()..).unwrap_or_default();
        match rest.is_empty() {
            true => format!("`{text}` is incomplete"),
            false => format!("cannot parse `{text}` at `{rest}`"),
        }
    })
}

/// Returns a bound on the depth of the expression: of parentheses, and of operators that bind to the right.
fn depth(text: &str) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for character in text.chars() {
        match character {
            '(' => open += 1,
            ')' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    let compact: String = text.split_whitespace().collect();
    most + compact.matches("**").count() + compact.matches("--").count()
}

fn assignment(input: &mut &str) -> Parsed<Statement> {
    let target = name(input)?;
    let operator = token(alt((
        "=".value(None),
        "+=".value(Some(Operator::Add)),
        "-=".value(Some(Operator::Subtract)),
        "*=".value(Some(Operator::Multiply)),
        "/=".value(Some(Operator::Divide)),
    )))
    .parse_next(input)?;
    let value = any_expression(input)?;
    let value = match operator {
        Some(operator) => operation(operator, Expression::Name(target.clone()), value),
        None => value,
    };
    Ok(Statement { target, value })
}

/// Parses an expression; operators bind as in Python.
fn any_expression(input: &mut &str) -> Parsed<Expression> {
    use Operator::{
        Add, Divide, Equal, Greater, GreaterOrEqual, Less, LessOrEqual, Multiply, NotEqual, Power,
        Subtract,
    };
    let arithmetic = alt((
        "**".value(Infix::Right(9, |_, a, b| Ok(operation(Power, a, b)))),
        "*".value(Infix::Left(5, |_, a, b| Ok(operation(Multiply, a, b)))),
        "/".value(Infix::Left(5, |_, a, b| Ok(operation(Divide, a, b)))),
        "+".value(Infix::Left(3, |_, a, b| Ok(operation(Add, a, b)))),
        "-".value(Infix::Left(3, |_, a, b| Ok(operation(Subtract, a, b)))),
    ));
    let comparison = alt((
        "<=".value(Infix::Neither(1, |_, a, b| Ok(operation(LessOrEqual, a, b)))),
        "<".value(Infix::Neither(1, |_, a, b| Ok(operation(Less, a, b)))),
        ">=".value(Infix::Neither(1, |_, a, b| Ok(operation(GreaterOrEqual, a, b)))),
        ">".value(Infix::Neither(1, |_, a, b| Ok(operation(Greater, a, b)))),
        "==".value(Infix::Neither(1, |_, a, b| Ok(operation(Equal, a, b)))),
        "!=".value(Infix::Neither(1, |_, a, b| Ok(operation(NotEqual, a, b)))),
    ));
    expression(operand)
        .prefix(token("-").value(Prefix(7, |_, of| Ok(Expression::Negated(Box::new(of))))))
        .infix(token(alt((arithmetic, comparison))))
        .parse_next(input)
}

fn operand(input: &mut &str) -> Parsed<Expression> {
    // `float` alone would also read a sign, `inf` and `nan`.
    let number = preceded(peek(one_of(('0'..='9', '.'))), float).map(Expression::Number);
    let group = delimited(token("("), any_expression, ")");
    token(alt((number, group, call_or_name))).parse_next(input)
}

fn call_or_name(input: &mut &str) -> Parsed<Expression> {
    let name = name(input)?;
    let arguments = separated(0.., any_expression, token(","));
    let arguments = opt(delimited(token("("), arguments, ")")).parse_next(input)?;
    Ok(match arguments {
        Some(arguments) => Expression::Call(name, arguments),
        None => Expression::Name(name),
    })
}

fn name(input: &mut &str) -> Parsed<String> {
    let first = one_of(('a'..='z', 'A'..='Z', '_'));
    let others = take_while(0.., ('a'..='z', 'A'..='Z', '0'..='9', '_'));
    token((first, others).take()).map(str::to_owned).parse_next(input)
}

/// Returns a parser that also takes the spaces after what `parser` takes.
fn token<'a, T>(
    parser: impl Parser<&'a str, T, ContextError>,
) -> impl Parser<&'a str, T, ContextError> {
    terminated(parser, space0)
}

fn operation(operator: Operator, left: Expression, right: Expression) -> Expression {
    Expression::Operation(operator, Box::new(left), Box::new(right))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes an expression with all its parentheses.
    fn shown(expression: &Expression) -> String {
        match expression {
            Expression::Number(number) => number.to_string(),
            Expression::Name(name) => name.clone(),
            Expression::Negated(of) => format!("(-{})", shown(of)),
            Expression::Operation(operator, left, right) => {
                format!("({} {operator:?} {})", shown(left), shown(right))
            }
            Expression::Call(name, arguments) => {
                let arguments: Vec<String> = arguments.iter().map(shown).collect();
                format!("{name}[{}]", arguments.join(", "))
            }
        }
    }

    fn parsed(text: &str) -> Vec<String> {
        let statements = parse(text).unwrap();
        statements.iter().map(|it| format!("{} = {}", it.target, shown(&it.value))).collect()
    }

    #[test]
    fn operators_bind_as_in_python() {
        let cases = [
            ("a - b - c", "((a Subtract b) Subtract c)"),
            ("a + b*c", "(a Add (b Multiply c))"),
            ("a / b / c", "((a Divide b) Divide c)"),
            ("-a**2", "(-(a Power 2))"),
            ("2**-a", "(2 Power (-a))"),
            ("a**b**c", "(a Power (b Power c))"),
            ("-a*b", "((-a) Multiply b)"),
            ("a*-b", "(a Multiply (-b))"),
            ("(a + b)*c", "((a Add b) Multiply c)"),
            ("a + b < c*d", "((a Add b) Less (c Multiply d))"),
            ("where(a >= 1e-3, f( a ), .5)", "where[(a GreaterOrEqual 0.001), f[a], 0.5]"),
        ];
        for (text, expected) in cases {
            assert_eq!(parsed(&format!("p={text}")), [format!("p = {expected}")], "{text}");
        }
    }

    #[test]
    fn statements_are_separated_by_semicolons_and_line_ends() {
        let expected = ["m = a", "p = (p Subtract m)"];
        assert_eq!(parsed("m = a; p -= m"), expected);
        assert_eq!(parsed("\n # a comment ; p = 0\n m = a # another\n\n p -= m;\n"), expected);
    }

    #[test]
    fn an_error_quotes_what_is_not_understood() {
        let cases = [
            ("m = a; p = m +", "`p = m +` is incomplete"),
            ("p = a b", "cannot parse `p = a b` at `b`"),
            ("p == a", "cannot parse `p == a` at `= a`"),
            ("p = a < b < c", "cannot parse `p = a < b < c` at `< c`"),
            ("p", "`p` is incomplete"),
            ("p = 1 + inf(", "cannot parse `p = 1 + inf(` at `(`"),
            ("3 = p", "cannot parse `3 = p` at `3 = p`"),
            ("p = é", "cannot parse `p = é` at `é`"),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text).unwrap_err(), expected, "{text}");
        }
    }

    /// The parser is recursive: no text may exhaust the stack.
    #[test]
    fn deep_texts_are_refused_or_parsed() {
        let parentheses = format!("{}g{}", "(".repeat(900), ")".repeat(900));
        let powers = format!("g{}", "**g".repeat(600));
        for deep in [parentheses, powers, format!("{}g", "-".repeat(1900))] {
            let error = parse(&format!("p = {deep}")).unwrap_err();
            assert!(error.ends_with("is nested more than 32 levels deep"), "{error}");
        }
        assert!(parse(&format!("p = g{}", "-g".repeat(900))).is_ok());
        assert!(parse(&"p = g\n".repeat(1000)).unwrap_err().starts_with("it has 6000 bytes"));
    }
}

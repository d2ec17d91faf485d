//! `gate`: may a fast path replace an exact one?

use perplexity_eval::compare::compare;
use perplexity_eval::gate::{Tolerances, Verdict, judge};

use crate::Failure;
use crate::args::GateArgs;
use crate::options::{UsageError, require_file};

/// The verdict for standard output; any but acceptance is a failure.
pub(crate) fn run(args: &GateArgs) -> Result<Vec<u8>, Failure> {
    let default = Tolerances::default();
    let tolerances = Tolerances {
        relative_kl: tolerance("--relative-kl", args.relative_kl)?.unwrap_or(default.relative_kl),
        nll: tolerance("--nll", args.nll)?.unwrap_or(default.nll),
    };
    require_file("report", &args.exact)?;
    require_file("report", &args.fast)?;
    let comparison = compare(&args.exact, &args.fast).map_err(Failure::failed)?;
    match judge(&comparison, &tolerances).map_err(Failure::failed)? {
        verdict @ Verdict::Accept(_) => Ok(format!("{verdict}\n").into_bytes()),
        other => Err(Failure::failed(other.to_string())),
    }
}

fn tolerance(option: &'static str, typed: Option<f64>) -> Result<Option<f64>, UsageError> {
    match typed {
        Some(value) if !(value.is_finite() && value >= 0.0) => Err(UsageError::UnknownValue {
            option,
            value: value.to_string(),
            expected: "a finite number, at least 0".to_owned(),
        }),
        _ => Ok(typed),
    }
}

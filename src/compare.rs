//! `compare`: two reports, window by window.

use crate::Failure;
use crate::args::CompareArgs;
use crate::options::require_file;

/// The comparison that `args` ask for, for standard output.
pub(crate) fn run(args: &CompareArgs) -> Result<Vec<u8>, Failure> {
    require_file("report", &args.first)?;
    require_file("report", &args.second)?;
    let comparison = perplexity_eval::compare::compare(&args.first, &args.second).map_err(Failure::failed)?;
    if args.json {
        return crate::json(&comparison);
    }
    let mut text = Vec::new();
    comparison.write_table(&mut text).map_err(Failure::failed)?;
    Ok(text)
}

//! `merge`: the reports of all shards become the report of the whole run.

use std::path::{Path, PathBuf};

use perplexity_eval::files::{Named, check_apart, read_regular};
use perplexity_eval::merge::merge;
use perplexity_eval::output::{self, OutputDirectory};
use perplexity_eval::report::{FILE_NAME, Report};
use perplexity_eval::table;

use crate::Failure;
use crate::args::MergeArgs;
use crate::options::{UsageError, require_file};

/// Joins the reports that `args` name, writes the result and returns its table for standard output.
pub(crate) fn run(args: &MergeArgs) -> Result<Vec<u8>, Failure> {
    output::check(&args.output).map_err(UsageError::Output)?;
    let mut inputs: Vec<Named<'_>> = Vec::new();
    for path in &args.reports {
        require_file("report", path)?;
        inputs.push(("one of the shards", path));
    }
    let report = args.output.join(FILE_NAME);
    check_apart(&inputs, &[("the report", &report)]).map_err(UsageError::Files)?;
    let parts = args.reports.iter().map(|path| Ok((path.clone(), read(path)?)));
    let parts: Vec<(PathBuf, Report)> = parts.collect::<Result<_, Failure>>()?;
    let report = merge(parts).map_err(Failure::failed)?;
    let directory = OutputDirectory::claim(&args.output).map_err(UsageError::Output)?;
    let path = directory.write(&report).map_err(Failure::failed)?;
    let mut text = Vec::new();
    table::write(&mut text, &report, &path).map_err(Failure::failed)?;
    Ok(text)
}

fn read(path: &Path) -> Result<Report, Failure> {
    let bytes =
        read_regular(path).map_err(|error| Failure::failed(format!("cannot read {}: {error}", path.display())))?;
    let in_file = |error: &dyn std::fmt::Display| Failure::failed(format!("{}: {error}", path.display()));
    let text = String::from_utf8(bytes).map_err(|error| in_file(&error))?;
    Report::from_json(&text).map_err(|error| in_file(&error))
}

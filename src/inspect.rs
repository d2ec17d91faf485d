//! `inspect`: what an artifact or a checkpoint holds, as text or as JSON.

use perplexity_model::inspect::Inspection;

use crate::Failure;
use crate::args::InspectArgs;
use crate::options::require_model;

/// The description that `args` ask for, for standard output.
pub(crate) fn run(args: &InspectArgs) -> Result<Vec<u8>, Failure> {
    require_model("model", &args.path)?;
    let inspection = Inspection::of_path(&args.path).map_err(Failure::failed)?;
    if args.json {
        return crate::json(&inspection);
    }
    Ok(inspection.to_string().into_bytes())
}

//! `inspect`: what an artifact or a checkpoint holds, as text or as JSON.

use perplexity_eval::humanize::printable;
use perplexity_model::inspect::Inspection;
use serde_json::Value;

use crate::Failure;
use crate::args::InspectArgs;
use crate::options::require_model;

/// The description that `args` ask for, for standard output.
pub(crate) fn run(args: &InspectArgs) -> Result<Vec<u8>, Failure> {
    require_model("model", &args.path)?;
    let mut inspection = Inspection::of_path(&args.path).map_err(Failure::failed)?;
    if args.json {
        return crate::json(&inspection);
    }
    clean(&mut inspection);
    Ok(inspection.to_string().into_bytes())
}

/// Makes every text that a file chose one printable line.
fn clean(inspection: &mut Inspection) {
    let line = |text: &mut String| *text = printable(text);
    line(&mut inspection.name);
    inspection.files.iter_mut().for_each(|file| line(&mut file.name));
    inspection
        .components
        .iter_mut()
        .for_each(|component| line(&mut component.id));
    inspection
        .resources
        .iter_mut()
        .for_each(|resource| line(&mut resource.role));
    inspection.notes.iter_mut().for_each(line);
    inspection.provenance = clean_value(&inspection.provenance);
}

/// A value with every text in it, names of members too, made printable.
fn clean_value(value: &Value) -> Value {
    match value {
        Value::String(text) => printable(text).into(),
        Value::Array(items) => items.iter().map(clean_value).collect(),
        Value::Object(members) => {
            let clean = |(name, value): (&String, &Value)| (printable(name), clean_value(value));
            members.iter().map(clean).collect()
        }
        other => other.clone(),
    }
}

//! Matrices as an artifact stores them, for backends that keep codes: formats and layouts as packings of the kernels.

use perplexity_kernels::ops::expand_weight::{Packing, StoredRows};

use crate::artifact::{Encoding, StoredPart};
use crate::formats::Format;
use crate::source::{SourceError, TextSource};

/// The packing of a stored matrix; `None` for formats that the kernels do not expand.
fn packing(encoding: &Encoding) -> Option<Packing> {
    Some(match encoding.format {
        Format::Bf16 => Packing::Bf16,
        Format::Q4G64Fp16 => Packing::Grouped { bits: 4 },
        Format::Q5G64Fp16 => Packing::Grouped { bits: 5 },
        Format::Q6G64Fp16 => Packing::Grouped { bits: 6 },
        Format::Q8G32Fp16 => Packing::Grouped { bits: 8 },
        Format::Nvfp4 => Packing::Nvfp4 {
            divisors: usize::try_from(encoding.divisors).ok()?,
        },
        Format::Fp8E4m3fnRowBf16 => Packing::Fp8Row,
        Format::Fp8E4m3fnBlock128F32 => Packing::Fp8Tile,
        Format::Fp32 | Format::Int32 | Format::Nvfp4Mul => return None,
    })
}

/// The stored rows that make up the matrix `name` of `shape` `[rows, columns]`, top to bottom. `None` when they are not
/// whole rows of such matrices, or the source has no stored bytes to give.
///
/// # Errors
/// When the parameter is missing or its bytes cannot be read.
pub fn stored_rows<'a>(
    source: &'a dyn TextSource,
    name: &str,
    shape: [usize; 2],
) -> Result<Option<Vec<StoredRows<'a>>>, SourceError> {
    let Some(artifact) = source.artifact() else {
        return Ok(None);
    };
    let refused = |error| SourceError(Box::new(error));
    let mut all = Vec::new();
    for part in artifact.stored_parts(name).map_err(refused)? {
        let Some((packing, object, rows)) = whole_rows(&part, shape[1]) else {
            return Ok(None);
        };
        all.push(StoredRows {
            bytes: artifact.object_bytes(part.object).map_err(refused)?,
            packing,
            shape: object,
            rows,
        });
    }
    let rows: usize = all.iter().map(|part| part.rows.len()).sum();
    Ok((rows == shape[0]).then_some(all))
}

/// Packing and shape of the part's object seen as rows of `columns`, and which of them the part is.
fn whole_rows(part: &StoredPart<'_>, columns: usize) -> Option<(Packing, [usize; 2], std::ops::Range<usize>)> {
    let packing = packing(&part.encoding)?;
    let index = |value: u64| usize::try_from(value).ok();
    let rows = match (packing, part.encoding.shape.as_slice()) {
        // Words in C order are rows of any width.
        (Packing::Bf16, shape) => {
            let elements = shape
                .iter()
                .try_fold(1usize, |n, extent| n.checked_mul(index(*extent)?))?;
            elements.is_multiple_of(columns).then_some(elements / columns)?
        }
        (_, [rows, width]) if index(*width)? == columns => index(*rows)?,
        _ => return None,
    };
    let (begin, end) = (index(part.begin)?, index(part.end)?);
    let whole = begin.is_multiple_of(columns) && end.is_multiple_of(columns);
    whole.then_some((packing, [rows, columns], begin / columns..end / columns))
}

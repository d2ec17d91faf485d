//! What can be wrong with a format name, a shape, encoded bytes or values to encode.

use super::{EncodeMethod, Format, Layout};

/// A refused format, layout, shape, word or value.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum FormatError {
    /// E01: no such numeric format.
    #[error("unknown numeric format `{name}`")]
    UnknownFormat {
        /// The name found.
        name: String,
    },
    /// E02: no such layout.
    #[error("unknown layout `{name}`")]
    UnknownLayout {
        /// The name found.
        name: String,
    },
    /// No such encoding method.
    #[error("unknown encoding method `{name}`")]
    UnknownMethod {
        /// The name found.
        name: String,
    },
    /// E03: the layout does not hold this format.
    #[error("format {format} is stored in layout {}, not in {layout}", format.layout())]
    LayoutMismatch {
        /// The format asked for.
        format: Format,
        /// The layout asked for.
        layout: Layout,
    },
    /// E03: the shape breaks the layout's rules.
    #[error("shape {shape:?} does not fit format {format}, which needs {needs}")]
    Shape {
        /// The format asked for.
        format: Format,
        /// The shape found.
        shape: Vec<u64>,
        /// The rule it breaks.
        needs: &'static str,
    },
    /// E03: several divisors for a format that has none, or a number that does not divide the rows into whole tiles.
    #[error("format {format} cannot have {divisors} divisors here")]
    UnexpectedDivisors {
        /// The format asked for.
        format: Format,
        /// The number of divisors found.
        divisors: u64,
    },
    /// E04: encoded bytes of the wrong length.
    #[error("{actual} bytes where the encoding takes {expected}")]
    Size {
        /// Bytes that format, layout and shape imply.
        expected: u64,
        /// Bytes found.
        actual: u64,
    },
    /// E05: an offset that is not a multiple of the layout's alignment.
    #[error("offset {offset} is not a multiple of {alignment}")]
    Alignment {
        /// Logical payload offset found.
        offset: u64,
        /// Alignment of the layout.
        alignment: u64,
    },
    /// E07: a divisor or multiplier of a whole matrix that is not finite and positive.
    #[error("matrix scale {index} is {value}, not finite and positive")]
    Divisor {
        /// Which divisor or multiplier, counted from 0.
        index: u64,
        /// Its value.
        value: f32,
    },
    /// E08: a word the format does not allow.
    #[error("{what} {index} is {word:#x}, which the format does not allow")]
    InvalidWord {
        /// The kind of word.
        what: &'static str,
        /// Its index in C order within its plane.
        index: u64,
        /// The word found.
        word: u32,
    },
    /// E08: padding or a gap between planes that is not zero.
    #[error("padding byte {at} is {word:#x}, not zero")]
    Padding {
        /// Byte position in the encoded tensor.
        at: u64,
        /// The byte found.
        word: u8,
    },
    /// F11: a size beyond 64 bits, or beyond the address space.
    #[error("{what} overflows")]
    Overflow {
        /// What was being computed.
        what: &'static str,
    },
    /// A range outside the tensor.
    #[error("element range [{begin}, {end}) of a tensor of {elements} elements")]
    Range {
        /// First element.
        begin: u64,
        /// One past the last element.
        end: u64,
        /// Elements of the tensor.
        elements: u64,
    },
    /// An output slice whose length is not the range's.
    #[error("output of {actual} values for {expected} elements")]
    OutputLength {
        /// Elements of the range.
        expected: u64,
        /// Length of the output.
        actual: u64,
    },
    /// The layout stores several matrices and has no order of elements.
    #[error("layout {layout} has no element order; its matrices are read one by one")]
    NoElementOrder {
        /// The layout asked for.
        layout: Layout,
    },
    /// An int32 value that f32 cannot hold exactly.
    #[error("int32 element {index} is {value}, which f32 cannot hold")]
    InexactInteger {
        /// Element index.
        index: u64,
        /// Its value.
        value: i32,
    },
    /// An encoding method that does not produce the format.
    #[error("method {method} does not encode {format}")]
    Method {
        /// The format asked for.
        format: Format,
        /// The method asked for.
        method: EncodeMethod,
    },
    /// NaN or infinity in the values to encode.
    #[error("value {index} is {value}")]
    NonFinite {
        /// Element index, C order.
        index: u64,
        /// Its value.
        value: f32,
    },
    /// A value outside the range of the format's scale or integer.
    #[error("value {index} is {value}, beyond the range of {format}")]
    OutOfRange {
        /// The format asked for.
        format: Format,
        /// Element index, C order.
        index: u64,
        /// Its value.
        value: f32,
    },
    /// A number of values, codes or scales other than the shape's.
    #[error("{actual} {what} where the shape takes {expected}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// Number the shape implies.
        expected: u64,
        /// Number found.
        actual: u64,
    },
    /// Values that do not end at the end of a row.
    #[error("{values} values are not whole rows of {columns}")]
    PartialRow {
        /// Values given.
        values: u64,
        /// Row length.
        columns: u64,
    },
}

impl FormatError {
    pub(crate) fn shape(format: Format, shape: &[u64], needs: &'static str) -> Self {
        Self::Shape {
            format,
            shape: shape.to_vec(),
            needs,
        }
    }
}

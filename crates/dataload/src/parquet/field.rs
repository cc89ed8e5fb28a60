//! The columns of a schema, and the kinds that their values are read as.

use std::sync::Arc;

use crate::columns::{self, Element, Field, FieldKind};
use ::parquet::basic::{ConvertedType, LogicalType, Repetition, Type as Physical};
use ::parquet::schema::types::{ColumnDescPtr, SchemaDescriptor, Type};

/// One leaf of the schema.
#[derive(Clone)]
pub(super) struct Leaf {
    pub(super) field: Field,
    /// The full path, with the nodes that the format inserts, as in `list.list.element`.
    pub(super) path: String,
    /// `None` where the values have no kind.
    pub(super) element: Option<Element>,
    pub(super) descriptor: ColumnDescPtr,
    /// For each list, outermost first, the lowest definition level at which it has an element.
    pub(super) list_levels: Arc<[i16]>,
}

impl columns::Leaf for Leaf {
    fn field(&self) -> &Field {
        &self.field
    }

    fn element(&self) -> Option<Element> {
        self.element
    }

    fn is_like(&self, other: &Self) -> bool {
        self.describe() == other.describe()
    }

    fn describe(&self) -> String {
        format!("{} of {:?} in {} lists", self.path, self.field.kind(), self.field.lists())
    }

    fn is_named(&self, name: &str) -> bool {
        let rest = self.field.name().strip_prefix(name);
        self.path == name || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

/// Every leaf of a schema, in the file's order.
pub(super) fn leaves(schema: &SchemaDescriptor) -> Vec<Leaf> {
    schema.columns().iter().map(|descriptor| leaf(schema, descriptor)).collect()
}

fn leaf(schema: &SchemaDescriptor, descriptor: &ColumnDescPtr) -> Leaf {
    let mut name: Vec<&str> = Vec::new();
    let mut list_levels = Vec::new();
    let (mut node, mut level) = (schema.root_schema(), 0);
    // The format inserts nodes between a list and its element, or a map and its entries; they are left out of the name.
    let mut unnamed = 0;
    for part in descriptor.path().parts() {
        let Some(child) = node.get_fields().iter().find(|child| child.name() == part) else { break };
        let child: &Type = child;
        let info = child.get_basic_info();
        let repetition = if info.has_repetition() { info.repetition() } else { Repetition::REQUIRED };
        level += i16::from(repetition != Repetition::REQUIRED);
        if repetition == Repetition::REPEATED {
            list_levels.push(level);
        }
        match unnamed {
            0 => name.push(child.name()),
            _ => unnamed -= 1,
        }
        unnamed += nodes_without_name(child);
        node = child;
        if !node.is_group() {
            break;
        }
    }
    let is_consistent = (level, list_levels.len()) == (descriptor.max_def_level(), descriptor.max_rep_level() as usize);
    let element = if is_consistent { element_of(descriptor) } else { Err("one of two columns of one name".to_owned()) };
    let kind = match &element {
        Ok(Element::Bytes) => FieldKind::Bytes,
        Ok(Element::Fixed(bytes)) => FieldKind::FixedBytes(*bytes),
        Ok(element) => FieldKind::Number(element.kind()),
        Err(found) => FieldKind::Unsupported(found.clone()),
    };
    // Each list adds one definition level, for being empty.
    let nullable = usize::from(descriptor.max_def_level().unsigned_abs()) > list_levels.len();
    let field = Field { name: name.join(".").into(), kind, lists: list_levels.len(), nullable };
    Leaf {
        field,
        path: descriptor.path().string(),
        element: element.ok(),
        descriptor: descriptor.clone(),
        list_levels: list_levels.into(),
    }
}

/// How many nodes below this one were inserted by the format, by the specification's backward-compatibility rules for
/// lists.
fn nodes_without_name(node: &Type) -> usize {
    let info = node.get_basic_info();
    let (logical, converted) = (info.logical_type_ref(), info.converted_type());
    let [repeated] = (if node.is_group() { node.get_fields() } else { &[] }) else { return 0 };
    let is_repeated =
        repeated.get_basic_info().has_repetition() && repeated.get_basic_info().repetition() == Repetition::REPEATED;
    if !is_repeated {
        return 0;
    }
    let is_map = matches!(logical, Some(LogicalType::Map))
        || matches!(converted, ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE);
    if is_map {
        return 1;
    }
    if !(matches!(logical, Some(LogicalType::List)) || converted == ConvertedType::LIST) {
        return 0;
    }
    let is_element = !repeated.is_group()
        || repeated.get_fields().len() != 1
        || repeated.name() == "array"
        || repeated.name() == format!("{}_tuple", node.name());
    if is_element { 1 } else { 2 }
}

/// The element type of a column, or the name of its type when there is no kind for it.
fn element_of(descriptor: &ColumnDescPtr) -> Result<Element, String> {
    let (logical, converted) = (descriptor.logical_type_ref(), descriptor.converted_type());
    let decimal = matches!(logical, Some(LogicalType::Decimal(_))) || converted == ConvertedType::DECIMAL;
    if decimal {
        return Err("decimal".to_owned());
    }
    let integer = match (logical, converted) {
        (Some(LogicalType::Integer(integer)), _) => Some((integer.bit_width, integer.is_signed)),
        (_, ConvertedType::INT_8) => Some((8, true)),
        (_, ConvertedType::INT_16) => Some((16, true)),
        (_, ConvertedType::UINT_8) => Some((8, false)),
        (_, ConvertedType::UINT_16) => Some((16, false)),
        (_, ConvertedType::UINT_32) => Some((32, false)),
        (_, ConvertedType::UINT_64) => Some((64, false)),
        _ => None,
    };
    let width = usize::try_from(descriptor.type_length()).unwrap_or(0);
    match (descriptor.physical_type(), integer) {
        (Physical::BOOLEAN, _) => Ok(Element::Bool),
        (Physical::INT32, Some((8, true))) => Ok(Element::Int8),
        (Physical::INT32, Some((16, true))) => Ok(Element::Int16),
        (Physical::INT32, Some((8, false))) => Ok(Element::Uint8),
        (Physical::INT32, Some((16, false))) => Ok(Element::Uint16),
        (Physical::INT32, Some((32, false))) => Ok(Element::Uint32),
        (Physical::INT32, Some((32, true)) | None) => Ok(Element::Int32),
        (Physical::INT64, Some((64, false))) => Err("uint64".to_owned()),
        (Physical::INT64, Some((64, true)) | None) => Ok(Element::Int64),
        (Physical::FLOAT, _) => Ok(Element::Float),
        (Physical::DOUBLE, _) => Ok(Element::Double),
        (Physical::BYTE_ARRAY, _) => Ok(Element::Bytes),
        (Physical::FIXED_LEN_BYTE_ARRAY, _) if matches!(logical, Some(LogicalType::Float16)) && width == 2 => {
            Ok(Element::Half)
        }
        (Physical::FIXED_LEN_BYTE_ARRAY, _) if width > 0 => Ok(Element::Fixed(width)),
        (physical, _) => Err(format!("{physical} as {logical:?}")),
    }
}

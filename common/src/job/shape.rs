//! Lists the keys that a type reads, from its own [`Deserialize`]: a list beside the type would be another thing to
//! keep.

use serde::de::value::{Error, StrDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess,
    Visitor,
};
use serde::forward_to_deserialize_any;

/// A text that is valid for names, and for durations.
const TEXT: &str = "1s";

/// Returns the paths of all keys of structs that `T` consists of, in their order. Keys of maps are not among them:
/// a file chooses them. Nor are keys below those of a section.
///
/// # Panics
/// If `T` refuses the values that it is given: 1 and `1s`, empty lists and maps, the first variant of an enum.
pub(crate) fn keys_of<T: DeserializeOwned>() -> Vec<String> {
    let mut keys = Vec::new();
    let read = T::deserialize(Recorder { path: String::new(), keys: &mut keys });
    read.map(drop).expect("the values are valid for all settings");
    keys
}

/// Gives a type some value, and notes the keys that it asks for.
struct Recorder<'a> {
    path: String,
    keys: &'a mut Vec<String>,
}

impl<'de> Deserializer<'de> for Recorder<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_str(TEXT)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.path.contains('.') {
            // A struct below a section is the value of one key.
            true => visitor.visit_map(Empty),
            false => visitor.visit_map(Fields { of: self, fields: fields.iter() }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let first: StrDeserializer<'_, Error> = variants[0].into_deserializer();
        visitor.visit_enum(first)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(true)
    }

    fn deserialize_u16<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_u64(1)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_u64(1)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_u64(1)
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_f32(1.0)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_f64(1.0)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(Empty)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(Empty)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u128 char str string bytes byte_buf unit unit_struct tuple tuple_struct identifier
        ignored_any
    }
}

/// The fields of a struct.
struct Fields<'a> {
    of: Recorder<'a>,
    fields: std::slice::Iter<'static, &'static str>,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        let Some(field) = self.fields.as_slice().first() else { return Ok(None) };
        let key: StrDeserializer<'_, Error> = (*field).into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let field = self.fields.next().expect("its key was read");
        let Recorder { path, keys } = &mut self.of;
        let path = if path.is_empty() { (*field).to_owned() } else { format!("{path}.{field}") };
        keys.push(path.clone());
        seed.deserialize(Recorder { path, keys })
    }
}

struct Empty;

impl<'de> SeqAccess<'de> for Empty {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        _: T,
    ) -> Result<Option<T::Value>, Error> {
        Ok(None)
    }
}

impl<'de> MapAccess<'de> for Empty {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, _: K) -> Result<Option<K::Value>, Error> {
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, _: V) -> Result<V::Value, Error> {
        unreachable!("there is no key")
    }
}

// What somebody meant who wrote the text of a codec or of an exchange with other punctuation.
#pragma once

#include <string>
#include <string_view>

namespace gradwire {

// "3LC s=1; coder:rice" -> "3lc:s=1,coder=rice". Not checked: the result may be no codec either.
std::string with_usual_punctuation(std::string_view text);

}  // namespace gradwire

// One tag and code to the value; combinational. The paper's decompression block (DB), the codec's
// clip_value (src/stages/float_clip/float_clip.h). Needs neither the bound nor the mode.
//
// The bytes of `code` that the tag leaves out are ignored.
module gw_lane_decompressor (
    input  logic [ 1:0] tag,
    input  logic [31:0] code,
    output logic [31:0] value
);
    // Sign, and magnitude in units of 2^-15.
    wire        sign = tag == 2'd1 ? code[7] : code[15];
    wire [14:0] magnitude = tag == 2'd1 ? {code[6:0], 8'd0} : code[14:0];

    // The place of the leading 1 gives the exponent, the bits below it the mantissa.
    logic [3:0] zeros;
    always_comb begin
        zeros = 4'd15;
        for (int i = 0; i < 15; i++) if (magnitude[i]) zeros = 4'd14 - i[3:0];
    end
    wire [ 7:0] exponent = 8'd126 - {4'd0, zeros};
    wire [13:0] mantissa = magnitude[13:0] << zeros;

    always_comb begin
        if (tag == 2'd3) value = code;
        else if (tag == 2'd0) value = 32'd0;
        else if (zeros == 4'd15) value = {sign, 31'd0};  // a sign without magnitude
        else value = {sign, exponent, mantissa, 9'd0};
    end
endmodule
